"""The process of a worker: started by the controller, does what it is asked, ends with it.

    python -m gemini.runtime.worker.worker_process CONNECTION STACKS PARENT

It ends when the connection closes or the controller dies, whatever way (the kernel is asked to see to that), and leaves
Ctrl-C to the controller. The stacks of its threads go to the descriptor STACKS when it crashes and on SIGUSR1: the
controller reads them there.

A request is answered by what it asks for; by `Raised`, when the unit's own code raises; or by `Refused`, with
everything as before, when it is ours that fails.
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
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int) -> None:
    """Die when the parent does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def main() -> None:
    """Serve until told to stop."""
    connection, stacks, parent = (int(one) for one in sys.argv[1:4])
    configure_process(stacks, parent)
    from gemini.runtime.transport.channel import Channel
    from gemini.runtime.transport.link import Link

    serve(lambda: Server(Link(Channel(socket.socket(fileno=connection)), side=1)), stacks)


def configure_process(stacks: int, parent: int) -> None:
    """Be a worker's process: end with the parent, leave Ctrl-C to the controller, and show stacks when asked."""
    bind_to_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def serve(make: Callable[[], Server], stacks: int = 2) -> NoReturn:
    """Serve until told to stop, or until the controller is gone; a failure of ours is written to `stacks`."""
    from gemini.runtime.transport.channel import ChannelClosed

    server = None
    try:
        server = make()  # kept to the end: torn down, it would complain of its open socket
        server.serve()
    except ChannelClosed:
        pass
    except BaseException:
        os.write(stacks, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)  # nothing of the user's is to be torn down here


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

        # An import in a function costs microseconds each time; at the top of this file it would come too early.
        self.protocol, self.closed, self.unreadable = protocol, ChannelClosed, UnreadableMessage
        self.refusal, self.unit_raised, self.build_raised = Refusal, ModuleRaised, build_raised
        self.link = link
        self.calls = ModuleServer(link.classes)
        self.relay = OutputRelay(link)
        self.peak = PeakMemory()
        self.steps: Any = None  # the executor's part, made when it is first asked for

    def serve(self) -> None:
        """Greet, then answer until Stop."""
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
        self.calls.device = device
        self.link.send(self.protocol.Ready(hello.secret, os.getpid()))
        while True:
            request, descriptors = (self.steps and self.steps.next()) or self.link.receive()
            if isinstance(request, stop):
                self._flush()
                return
            if isinstance(request, preload):
                self.calls.is_settled = False
                _import(request.names)
                continue
            if isinstance(request, drop):
                self.calls.drop(request.calls)
                continue
            self._reply(request, self._answer(request, descriptors))
            del request  # its tensors are the controller's slabs

    def _reply(self, request: Any, reply: Any) -> None:
        """Send a reply; one that cannot cross is taken back."""
        self._flush()
        try:
            self.link.send(reply)
        except self.closed:
            raise
        except BaseException as error:
            if isinstance(reply, self.protocol.Raised):
                self.link.send(reply._replace(exception=_plainly(reply.exception), chain=reply.chain[:1]))
                return
            if isinstance(request, self.protocol.Forward):
                self.calls.undo(request.unit, request.number)
            self.link.send(_refused(request, error))

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.relay.deliver()

    def _answer(self, request: Any, descriptors: list[int]) -> Any:
        try:
            return self._carry_out(request, descriptors) or self.protocol.Done(request.number)
        except self.unit_raised as raised:
            return self.build_raised(request.number, raised, raised.scope, self.calls.device, self.link.classes)
        except self.refusal as refusal:
            return self.protocol.Refused(request.number, str(refusal))
        except BaseException as error:
            if isinstance(request, self.protocol.Forward):
                self.calls.undo(request.unit, request.number)
            return _refused(request, error)

    def _carry_out(self, request: Any, descriptors: list[int]) -> Any:
        if isinstance(request, self.protocol.Forward):
            if request.dropped:
                self.calls.drop(request.dropped)
            return self.calls.forward(request)
        self.calls.is_settled = False
        if isinstance(request, self.protocol.Backward):
            self.calls.drop(request.dropped)
            return self.calls.backward(request)
        if isinstance(request, self.unreadable):
            raise TypeError(request.reason)
        if type(request).__module__ == "gemini.runtime.step_messages":
            return self._carry_out_step(request, descriptors)
        if isinstance(request, self.protocol.MapTensors):
            self.peak.settle()
            segment = self.calls.device.open(request.size, request.shared, tuple(descriptors))
            self.link.homes.update(enumerate([home.open(segment) for home in request.homes], request.first))
            return None
        if isinstance(request, self.protocol.InstallModules):
            return self.calls.install(request.units)
        if isinstance(request, self.protocol.Forget):
            self.calls.forget(request.units)
            for number in request.homes:
                self.link.homes.pop(number, None)
            return None
        if isinstance(request, self.protocol.DescribeClasses):
            from gemini.guards.monkeypatches import describe_classes

            return self.protocol.ClassAttributes(request.number, describe_classes(request.classes))
        if isinstance(request, self.protocol.MeasureSpeed):
            from gemini.profiling.host_speed import measure_speed

            return self.protocol.MeasuredSpeed(request.number, *measure_speed())
        if isinstance(request, self.protocol.MeasurePeak):
            return self.peak.begin() if request.begins else self.protocol.MeasuredPeak(request.number, self.peak.mb())
        raise TypeError(f"unknown request {type(request).__name__}")

    def _carry_out_step(self, request: Any, descriptors: list[int]) -> Any:
        if self.steps is None:
            from gemini.runtime.worker.step_server import StepServer

            self.steps = StepServer(self.link)
        return self.steps.carry_out(request, descriptors)


def _import(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # whoever needs it will say what is wrong
            importlib.import_module(name)


def _refused(request: Any, error: BaseException) -> Any:
    """A reply that says what went wrong on our side."""
    from gemini.runtime.exception_transfer import safe_text
    from gemini.runtime.protocol import Refused
    from gemini.runtime.transport.tensor_header import UnsendableTensor

    reason = safe_text(error) if isinstance(error, UnsendableTensor) else f"{type(error).__name__}: {safe_text(error)}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Refused(request.number, f"{reason:.300}\n{trace}", is_fault=not isinstance(error, UnsendableTensor))


def _plainly(sent: Any) -> Any:
    from gemini.runtime.exception_transfer import rebuild, to_builtin

    return to_builtin(rebuild(sent))


if __name__ == "__main__":
    main()
