"""Faults: what went wrong, and what the program sees of it.

the unit's own code raises     the same exception here, its traceback goes on in the worker, and a note says where
something of ours fails        the call is undone and made here: one line says so, and it is counted;
                               with `strict` it is an error
a worker is lost               WorkerError; afterwards the model runs here, with one line; with `strict` every
                               call is an error
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gemini.errors import WorkerError
from gemini.ir.autograd_modes import Region
from gemini.log import tell
from gemini.runtime import tracebacks
from gemini.runtime.exception_transfer import raising_line, rebuild
from gemini.runtime.failure_replay import MAX_SAVED, Failure, save
from gemini.runtime.pool.worker_failure import describe_out_of_memory
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import Raised
from gemini.runtime.transport.tensor_header import UnsendableTensor


class _Module(Protocol):
    """A module that a worker runs."""

    @property
    def name(self) -> str: ...
    @property
    def worker(self) -> WorkerHandle: ...
    @property
    def modes(self) -> Sequence[bool]: ...


class _Call(Protocol):
    """A call of such a module."""

    @property
    def unit(self) -> _Module: ...
    @property
    def arguments(self) -> tuple[Any, Any] | None: ...
    @property
    def generator(self) -> bytes: ...
    @property
    def region(self) -> Region: ...


class WorkerTraceback(Exception):
    """The traceback in the worker, shown as the cause of the exception here where Python shows no notes."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ThreadContext(threading.local):
    """What this thread works on."""

    micro_batch = ""


thread_context = ThreadContext()


class FaultPolicy:
    """The faults of one model so far, and how it treats them."""

    def __init__(self, name: str, quiet: bool = False, strict: bool = False) -> None:
        self.name, self.quiet, self.strict = name, quiet, strict
        self.survives = False  # a lost worker is no error of the program's: its model goes on in this process
        self.demotions = 0  # calls that were made here because something of ours failed
        self.folder: Path | None = None  # where failed calls are saved
        self.plan: list[list[Any]] = []  # units and their workers
        self._saved = 0
        self._said: set[str] = set()

    def demote(self, what: str, error: BaseException) -> None:
        """Something of ours has failed and will be done here instead; raises with `strict`."""
        self.demotions += 1
        kind = "" if isinstance(error, InternalFault) else f"{type(error).__name__}: "
        reason = describe_out_of_memory(error) or f"{kind}{error}".partition("\n")[0]
        if self.strict:
            raise WorkerError(
                f"{what} failed in a worker: {error}\n    → without strict=True it runs in this process instead"
            ) from error
        # What cannot be sent to one unit cannot be sent to others: that is said once.
        once = str(error.__cause__) if isinstance(error.__cause__, UnsendableTensor) else what
        self.say(f"{what} runs in this process: {reason:.400}", once=once)

    def save(
        self, call: _Call, action: str, error: BaseException, gradients: Sequence[Any] = (), trace: str = ""
    ) -> None:
        """Save a call that failed, and note on the exception where. A failure to do so is no failure."""
        if (
            self.folder is None
            or self._saved >= MAX_SAVED
            or not isinstance(error, Exception)
            or call.arguments is None
        ):
            return
        self._saved += 1
        unit, (args, kwargs) = call.unit, call.arguments
        try:
            failure = Failure(
                self.name, unit.name, action, unit.worker.index, f"{type(error).__name__}: {error}"[:10_000],
                trace[:100_000], self.plan, tuple(args), dict(kwargs), list(gradients),
                call.generator, call.region, list(unit.modes),
            )  # fmt: skip
            add_fault_note(error, f"saved for replay in {save(self.folder, failure)}")
        except Exception as problem:
            self.say(f"the failed call could not be saved: {problem!s:.200}", once="saving")

    def say(self, text: str, once: str = "") -> None:
        """One line to the user; only the first with the same `once`."""
        if self.quiet or once in self._said:
            return
        if once:
            self._said.add(once)
        tell(f"gemini: {text}")


def worker_exception(reply: Any, unit: _Module, what: str) -> BaseException:
    """The exception to raise for what a unit's code has raised in its worker."""
    if not isinstance(reply, Raised):
        return WorkerError(f"worker {unit.worker.index} answered {what} of {unit.name} with {reply!r:.200}")
    scope = ".".join(part for part in (unit.name, reply.scope) if part)
    text = f"in worker {unit.worker.index}, {what} of {scope}"
    if thread_context.micro_batch:
        text += f", {thread_context.micro_batch}"
    if line := raising_line(reply.traceback):
        text += f", at {line}"
    return rebuild_with_traceback(reply, text)


def rebuild_with_traceback(reply: Raised, text: str) -> BaseException:
    """The exception of a reply, with the frames that it went through in the worker and a note."""
    error = rebuild(reply.exception)
    tracebacks.attach_traceback(error, reply.chain, rebuild)
    if sys.version_info < (3, 11):
        error.__cause__ = WorkerTraceback(reply.traceback)
    add_fault_note(error, text)
    return error


def add_fault_note(error: BaseException, text: str) -> None:
    """Add a note; where Python does not show notes, to the text of the cause as well."""
    tracebacks.add_note(error, text)
    if sys.version_info < (3, 11) and isinstance(error.__cause__, WorkerTraceback):
        error.__cause__.args = (f"{error.__cause__.args[0].rstrip()}\n{text}",)
