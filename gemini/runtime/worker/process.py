"""The process of a worker: started by the controller, does what it is asked, ends with it.

    python -m gemini.runtime.worker.process DESCRIPTOR

It ends when the connection closes or the controller dies, whatever way (the kernel is asked to see to that), leaves
Ctrl-C to the controller, and writes the stacks of its threads to the error output on SIGUSR1.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1


def bind_to_parent(parent: int) -> None:
    """Die when the parent does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def main() -> None:
    """Serve until told to stop."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    bind_to_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from gemini.runtime.transport.channel import Channel, ChannelClosed
    from gemini.runtime.transport.link import Link

    link = Link(Channel(socket.socket(fileno=descriptor)))
    try:
        Server(link).serve()
    except ChannelClosed:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing of the user's is to be torn down here


class Server:
    """Answers requests one by one."""

    def __init__(self, link: Any) -> None:
        from gemini.runtime.worker.calls import Calls

        self.link = link
        self.calls = Calls(link.classes)

    def serve(self) -> None:
        """Greet, then answer until Stop."""
        import torch

        from gemini.runtime.protocol import Ready, Stop

        hello, _ = self.link.receive()
        sys.path[:] = hello.path
        torch.set_num_threads(hello.threads)
        torch.set_default_dtype(hello.dtype)
        self.link.send(Ready(hello.secret, os.getpid()))
        while True:
            request, descriptors = self.link.receive()
            if isinstance(request, Stop):
                return
            self.link.send(self._answer(request, descriptors))

    def _answer(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Done, Raised, Refused
        from gemini.runtime.transport.tensors import Unsendable
        from gemini.runtime.worker.audit import Refusal

        try:
            return self._carry_out(request, descriptors) or Done(request.number)
        except (Refusal, Unsendable) as refusal:
            return Refused(request.number, str(refusal))
        except Exception as error:
            trace = traceback.format_exc()
            return Raised(request.number, _portable(error), type(error).__name__, str(error), trace)

    def _carry_out(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Backward, Forward, Install, Place
        from gemini.runtime.transport.slabs import Segment

        self.calls.drop(getattr(request, "dropped", []))
        if isinstance(request, Forward):
            return self.calls.forward(request)
        if isinstance(request, Backward):
            return self.calls.backward(request)
        if isinstance(request, Place):
            segment = Segment(request.size, descriptors[0])
            self.link.homes += [home.open(segment) for home in request.homes]
            return None
        if isinstance(request, Install):
            return self.calls.install(request.units)
        raise TypeError(f"unknown request {type(request).__name__}")


def _portable(error: BaseException) -> BaseException | None:
    """The exception, if it survives the journey."""
    import cloudpickle

    try:
        found = cloudpickle.loads(cloudpickle.dumps(error))
        return error.with_traceback(None) if type(found) is type(error) else None
    except Exception:
        return None


if __name__ == "__main__":
    main()
