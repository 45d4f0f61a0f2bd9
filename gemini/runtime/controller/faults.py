"""Faults: an exception of a worker comes up in the program as what it is, with a note of where it happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from gemini.errors import WorkerError
from gemini.runtime.protocol import Raised

if TYPE_CHECKING:
    from gemini.runtime.controller.unit import Unit


class WorkerTraceback(Exception):
    """The traceback in the worker, shown as the cause of the exception here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raise_remote(reply: Any, unit: Unit, what: str) -> NoReturn:
    """Raise what a worker raised."""
    where = f"in worker {unit.worker.place}, {what} of {unit.name}"
    if not isinstance(reply, Raised):
        raise WorkerError(f"worker {unit.worker.place} answered {what} of {unit.name} with {reply!r:.200}")
    cause = WorkerTraceback(reply.traceback)
    if reply.exception is None:
        raise RuntimeError(f"{reply.name}: {reply.text} ({where})") from cause
    notes = [*getattr(reply.exception, "__notes__", ()), where]
    reply.exception.__notes__ = notes  # type: ignore[attr-defined]
    raise reply.exception from cause
