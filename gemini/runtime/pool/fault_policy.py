"""Fault policy: what went wrong in a worker, and what the script sees of it.

user code raises             the same exception in the script; its traceback continues in the worker, with a note
internal fault               the call is undone and runs in the controller: one log line, and it is counted; an error
                             with `strict`
a worker is lost             WorkerError; afterwards the model runs in the controller, with one log line; with `strict`
                             every call is an error
a worker is out of memory    an internal fault; one log line per model

Stacks are written to the run folder, and the line names the file.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from gemini.errors import ArtifactError, WorkerError
from gemini.ir.autograd_modes import Region
from gemini.log import log_line
from gemini.runtime import tracebacks
from gemini.runtime.exception_transfer import raising_line, rebuild
from gemini.runtime.failure_replay import MAX_SAVED, Failure, save
from gemini.runtime.pool.worker_failure import OUT_OF_MEMORY, STACKS, describe_out_of_memory, save_stacks
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import Raised
from gemini.runtime.transport.tensor_header import UnsendableTensor

_LOSS = "a worker is lost"


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
    def remote_module(self) -> _Module: ...
    @property
    def arguments(self) -> tuple[Any, Any] | None: ...
    @property
    def generator(self) -> bytes: ...
    @property
    def region(self) -> Region: ...


class WorkerTraceback(Exception):
    """The traceback in the worker, shown as the cause of the exception where Python shows no notes."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ThreadContext(threading.local):
    """What this thread works on."""

    micro_batch = ""


thread_context = ThreadContext()


class FaultPolicy:
    """The faults of one model so far, and how they are handled."""

    def __init__(self, name: str, quiet: bool = False, strict: bool = False) -> None:
        self.name, self.quiet, self.strict = name, quiet, strict
        self.survives = False  # the loss of a worker is not raised: the model continues in this process
        self.demotions = 0  # calls that ran in the controller after an internal fault
        self.folder: Path | None = None  # in which failed calls are saved
        self.plan: list[list[Any]] = []  # remote modules and their workers
        self._saved = 0
        self._logged: set[str] = set()

    def demote(self, what: str, error: BaseException) -> None:
        """Note an internal fault whose work will run in the controller instead; raise with `strict`."""
        self.demotions += 1
        kind = "" if isinstance(error, InternalFault) else f"{type(error).__name__}: "
        reason = describe_out_of_memory(error) or f"{kind}{error}".partition("\n")[0]
        if self.strict:
            raise WorkerError(
                f"{what} failed in a worker: {error}\n    → without strict=True it runs in this process instead"
            ) from error
        if isinstance(error, WorkerError):
            self.report_loss(str(error))
            return
        if reason.startswith(OUT_OF_MEMORY):
            self._report_shortage(what, f"{reason:.400}", error)
            return
        # A tensor that cannot be sent to one module cannot be sent to others: log it once.
        once = str(error.__cause__) if isinstance(error.__cause__, UnsendableTensor) else what
        self.say(f"{what} runs in this process: {reason:.400}", once=once)

    def report_loss(self, reason: str) -> None:
        """Log why the model has no workers any more, once per model."""
        if self.quiet or _LOSS in self._logged:
            return
        first, has_stacks, _ = reason.partition("\n")[0].partition(STACKS)
        remedy = reason.rpartition("\n    → ")[2] if "\n    → " in reason else ""
        place = self._save_stacks(reason) if has_stacks else ""
        what = f"{first}{place} → {remedy}" if remedy else f"{first}{place}"
        self.say(f"{self.name} runs in this process from now on: {what}", once=_LOSS)

    def _report_shortage(self, what: str, reason: str, error: BaseException) -> None:
        """Log that a worker is out of memory, once per model."""
        if self.quiet or OUT_OF_MEMORY in self._logged:
            return
        place = self._save_stacks("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        self.say(f"{what} runs in this process, as does all that does not fit: {reason}{place}", once=OUT_OF_MEMORY)

    def _save_stacks(self, text: str) -> str:
        """Write stacks to the run folder; return the words that name the file, '' if there is none."""
        if self.folder is None:
            return ""
        try:
            return f"{STACKS} {save_stacks(self.folder, text)}"
        except (OSError, ArtifactError):
            return ""

    def save(
        self, call: _Call, action: str, error: BaseException, gradients: Sequence[Any] = (), trace: str = ""
    ) -> None:
        """Save a call that failed, and note the folder on the exception. A failure to save is only logged."""
        if (
            self.folder is None
            or self._saved >= MAX_SAVED
            or not isinstance(error, Exception)
            or call.arguments is None
        ):
            return
        self._saved += 1
        remote, (args, kwargs) = call.remote_module, call.arguments
        try:
            failure = Failure(
                self.name, remote.name, action, remote.worker.index, f"{type(error).__name__}: {error}"[:10_000],
                trace[:100_000], self.plan, tuple(args), dict(kwargs), list(gradients),
                call.generator, call.region, list(remote.modes),
            )  # fmt: skip
            add_fault_note(error, f"saved for replay in {save(self.folder, failure)}")
        except Exception as problem:
            self.say(f"the failed call could not be saved: {problem!s:.200}", once="saving")

    def say(self, text: str, once: str = "") -> None:
        """Log one line to the user; only the first with the same `once`."""
        if self.quiet or once in self._logged:
            return
        if once:
            self._logged.add(once)
        log_line(f"gemini: {text}")


def worker_exception(reply: Any, remote: _Module, what: str) -> BaseException:
    """Return the exception to raise for what user code has raised in a worker."""
    if not isinstance(reply, Raised):
        return WorkerError(f"worker {remote.worker.index} answered {what} of {remote.name} with {reply!r:.200}")
    scope = ".".join(part for part in (remote.name, reply.scope) if part)
    text = f"in worker {remote.worker.index}, {what} of {scope}"
    if thread_context.micro_batch:
        text += f", {thread_context.micro_batch}"
    if line := raising_line(reply.traceback):
        text += f", at {line}"
    return rebuild_with_traceback(reply, text)


def rebuild_with_traceback(reply: Raised, text: str) -> BaseException:
    """Return the exception of a reply, with the frames that it passed in the worker and a note."""
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
