"""Worker process: started by the controller, answers its requests, ends with it.

    python -m gemini.runtime.worker.worker_process CONNECTION STACKS PARENT

It ends when the connection closes or the controller dies (PDEATHSIG), and leaves Ctrl-C to the controller. The stacks
of its threads go to the descriptor STACKS when it crashes and on SIGUSR1; the controller reads them there.

A request is answered by its result; by `Raised`, if user code raises; or by `Refused`, with the state as before, if
Gemini's own code fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def main() -> None:
    """Serve until stopped."""
    connection, stacks, parent = (int(one) for one in sys.argv[1:4])
    configure_process(stacks, parent)
    from gemini.runtime.transport.channel import Channel
    from gemini.runtime.transport.link import Link

    serve(lambda: Server(Link(Channel(socket.socket(fileno=connection)), side=1)), stacks)


def configure_process(stacks: int, parent: int) -> None:
    """Set up a worker process: end with the parent, ignore Ctrl-C, and dump stacks on request."""
    bind_to_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def serve(make: Callable[[], Server], stacks: int = 2) -> NoReturn:
    """Serve until stopped or until the controller is gone; an internal failure is written to `stacks`."""
    from gemini.runtime.transport.channel import ChannelClosed

    server = None
    try:
        server = make()  # referenced to the end: its destructor would warn about the open socket
        server.serve()
    except ChannelClosed:
        pass
    except BaseException:
        os.write(stacks, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)  # skips destructors of user objects


class Server:
    """Answers requests one by one."""

    def __init__(self, link: Any) -> None:
        from gemini.runtime import protocol
        from gemini.runtime.transport.channel import ChannelClosed
        from gemini.runtime.transport.link import UnreadableMessage
        from gemini.runtime.worker.memory_peak import PeakMemory
        from gemini.runtime.worker.module_server import ModuleRaised, ModuleServer, build_raised
        from gemini.runtime.worker.output_relay import OutputRelay
        from gemini.runtime.worker.side_effect_check import Refusal

        # An import in a method costs microseconds per call; at the top of this file it would run before the setup.
        self.protocol, self.closed, self.unreadable = protocol, ChannelClosed, UnreadableMessage
        self.refusal, self.module_raised, self.build_raised = Refusal, ModuleRaised, build_raised
        self.link = link
        self.modules = ModuleServer(link.classes)
        self.relay = OutputRelay(link)
        self.peak = PeakMemory()
        self.steps: Any = None  # the step server, created on first use

    def serve(self) -> None:
        """Send Ready, then answer until Stop."""
        import torch

        from gemini.runtime.devices.registry import create_device

        preload, drop, stop = self.protocol.Preload, self.protocol.DropCalls, self.protocol.Stop
        hello, _ = self.link.receive()
        sys.path[:] = hello.path
        sys.setrecursionlimit(hello.recursion)
        torch.set_num_threads(hello.threads)
        torch.set_default_dtype(hello.dtype)
        self.relay.install()
        device = create_device(hello.device, hello.back_end)
        device.prepare()
        self.link.set_device(device)
        self.modules.device = device
        self.link.send(self.protocol.Ready(hello.secret, os.getpid(), time.perf_counter()))
        while True:
            request, descriptors = (self.steps and self.steps.next()) or self.link.receive()
            if isinstance(request, stop):
                self._flush()
                return
            if isinstance(request, preload):
                self.modules.are_flags_set = False
                _import(request.names)
                continue
            if isinstance(request, drop):
                self.modules.drop(request.calls)
                continue
            self._reply(request, self._answer(request, descriptors))
            del request  # its tensors hold slabs of the controller

    def _reply(self, request: Any, reply: Any) -> None:
        """Send a reply; undo the request if it cannot be sent."""
        self._flush()
        try:
            self.link.send(reply)
        except self.closed:
            raise
        except BaseException as error:
            if isinstance(reply, self.protocol.Raised):
                self.link.send(reply._replace(exception=_simplify(reply.exception), chain=reply.chain[:1]))
                return
            if isinstance(request, self.protocol.Forward):
                self.modules.undo(request.module, request.number)
            self.link.send(_build_refused(request, error))

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.relay.flush()

    def _answer(self, request: Any, descriptors: list[int]) -> Any:
        try:
            return self._execute(request, descriptors) or self.protocol.Done(request.number)
        except self.module_raised as raised:
            return self.build_raised(request.number, raised, raised.scope, self.modules.device, self.link.classes)
        except self.refusal as refusal:
            return self.protocol.Refused(request.number, str(refusal))
        except BaseException as error:
            if isinstance(request, self.protocol.Forward):
                self.modules.undo(request.module, request.number)
            return _build_refused(request, error)

    def _execute(self, request: Any, descriptors: list[int]) -> Any:
        if isinstance(request, self.protocol.Forward):
            if request.dropped:
                self.modules.drop(request.dropped)
            return self.modules.forward(request)
        self.modules.are_flags_set = False
        if isinstance(request, self.protocol.Backward):
            self.modules.drop(request.dropped)
            return self.modules.backward(request)
        if isinstance(request, self.unreadable):
            raise TypeError(request.reason)
        if type(request).__module__ == "gemini.runtime.step_messages":
            return self._execute_step_request(request, descriptors)
        if isinstance(request, self.protocol.MapTensors):
            self.peak.settle()
            segment = self.modules.device.open(request.size, request.shared, tuple(descriptors))
            self.link.shared_tensors.update(
                enumerate([layout.open(segment) for layout in request.layouts], request.first)
            )
            return None
        if isinstance(request, self.protocol.InstallModules):
            return self.modules.install(request.modules)
        if isinstance(request, self.protocol.Forget):
            self.modules.forget(request.modules)
            for number in request.tensors:
                self.link.shared_tensors.pop(number, None)
            return None
        if isinstance(request, self.protocol.DescribeClasses):
            from gemini.guards.monkeypatches import describe_classes

            return self.protocol.ClassAttributes(request.number, describe_classes(request.classes))
        if isinstance(request, self.protocol.MeasureSpeed):
            from gemini.profiling.host_speed import measure_speed

            return self.protocol.MeasuredSpeed(request.number, *measure_speed())
        if isinstance(request, self.protocol.MeasureLink):
            return self.protocol.MeasuredLink(request.number, request.contents)
        if isinstance(request, self.protocol.MeasurePeak):
            return self.peak.begin() if request.begins else self.protocol.MeasuredPeak(request.number, self.peak.mb())
        raise TypeError(f"unknown request {type(request).__name__}")

    def _execute_step_request(self, request: Any, descriptors: list[int]) -> Any:
        if self.steps is None:
            from gemini.runtime.worker.step_server import StepServer

            self.steps = StepServer(self.link)
        return self.steps.execute(request, descriptors)


def _import(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # the code that needs it reports the error
            importlib.import_module(name)


def _build_refused(request: Any, error: BaseException) -> Any:
    """Return a reply that describes an internal failure."""
    from gemini.runtime.exception_transfer import safe_text
    from gemini.runtime.protocol import Refused
    from gemini.runtime.transport.tensor_header import UnsendableTensor

    reason = safe_text(error) if isinstance(error, UnsendableTensor) else f"{type(error).__name__}: {safe_text(error)}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Refused(request.number, f"{reason:.300}\n{trace}", is_fault=not isinstance(error, UnsendableTensor))


def _simplify(sent: Any) -> Any:
    from gemini.runtime.exception_transfer import rebuild, to_builtin

    return to_builtin(rebuild(sent))


if __name__ == "__main__":
    main()
