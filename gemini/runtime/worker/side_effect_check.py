"""The audit: what a unit may not do in a worker, noticed in every call and undone.

A worker has copies of the arguments and of the module's Python state. A unit that changes them (a counter, an input
written in place), gives a parameter other memory (`weight.data = …`) or draws from Python's generators would leave the
controller's untouched, and the model would silently be another. Such a call is refused, with the buffers as before, and
the controller runs it. Objects that it was given and that are known to be alike on both sides (a key-value cache) may
change: the change is sent back. A call that raises is left as it is, half its buffers written, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.guards.module_state import ModuleState
from gemini.runtime.argument_mutations import ArgumentObjects, Contents
from gemini.runtime.placeholder_tensors import PLACEHOLDER_USED, PlaceholderUse
from gemini.runtime.transport.serialization import ClassTable
from gemini.runtime.worker.host_rng_check import HostRngCheck


class Refusal(Exception):
    """A unit did what cannot be done from afar."""


class HostRngUsed(Refusal):
    """It drew from Python's or NumPy's random numbers."""


HOST_RNG = HostRngCheck()


class BufferWrites:
    """The buffers that a module writes in its forward: saved before a call, and restored if it is undone."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = list(module.buffers())
        self.written: set[int] | None = None  # None: not known yet

    def save(self) -> list[tuple[int, torch.Tensor]]:
        """Return copies of the buffers that a call may write."""
        at_risk = range(len(self.buffers)) if self.written is None else self.written
        return [(at, self.buffers[at].detach().clone()) for at in at_risk] if at_risk else []

    def restore(self, saved: list[tuple[int, torch.Tensor]]) -> None:
        """Write saved contents back."""
        for at, before in saved:
            self.buffers[at].data.copy_(before)

    def find_written(self, saved: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Return the saved buffers that have changed, by contents: batch normalisation bumps no version counter."""
        return [(at, before) for at, before in saved if not _equal_with_nan(before, self.buffers[at])]


class SideEffectCheck:
    """Watches the calls of one module."""

    def __init__(self, module: nn.Module, classes: ClassTable) -> None:
        self.module, self.classes = module, classes
        self.buffers = BufferWrites(module)
        self.memory = TensorBackup([*module.parameters(), *self.buffers.buffers])
        self.snapshot = ModuleState(module)
        self.given = ArgumentObjects((), {}, classes)  # what the last call was given
        self.changes: dict[int, Contents] = {}  # and what it has changed of that
        self._saved: list[tuple[int, torch.Tensor]] = []  # buffers before the last call
        HOST_RNG.have_been_made()  # what importing its classes has drawn is not its own

    def watch(
        self, run: Callable[..., Any], args: Any, kwargs: Any, inputs: list[torch.Tensor], given: ArgumentObjects
    ) -> Any:
        """Run a call; raises Refusal, with buffers as before, if it did what it may not."""
        learns = self.buffers.written is None
        self._saved = self.buffers.save()
        versions = [tensor._version for tensor in inputs]
        self.given = given
        self.memory.look()
        failure: BaseException | None = None
        result = None
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            failure = error
        has_moved = self.memory.put_back()
        if learns:
            self._saved = self.buffers.find_written(self._saved)
            self.buffers.written = {at for at, _ in self._saved} if failure is None else None
        has_drawn = HOST_RNG.have_been_made()
        reason = PLACEHOLDER_USED if PlaceholderUse.have_been_made() else self._fault(inputs, versions, failure)
        reason = reason or has_moved
        if reason or has_drawn:
            self.undo()
            raise Refusal(reason) if reason else HostRngUsed("it draws from Python's or NumPy's random numbers")
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback knows this frame
        return result

    def undo(self) -> None:
        """Put the buffers back to what they were before the last call."""
        saved, self._saved = self._saved, []
        self.buffers.restore(saved)

    def _fault(self, inputs: list[torch.Tensor], versions: list[int], failure: BaseException | None) -> str:
        if [tensor._version for tensor in inputs] != versions:
            return "it writes to its inputs"
        changes = self.given.changes() if self.given.objects else {}
        if isinstance(changes, str):
            return changes
        if changes and failure is not None:
            return "it changes an object that it was given, and raises"
        self.changes = changes
        changed = self.snapshot.find_change()
        return f"in its forward {changed}" if changed else ""


class TensorBackup:
    """Where tensors lie that both sides have."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._places: list[Any] = []
        self._before: list[torch.Tensor] = []  # the tensors in the memory that they have

    def look(self) -> None:
        """Remember where they are now."""
        places = [*map(_place, self.tensors)]
        if places != self._places:
            self._places, self._before = places, [tensor.data for tensor in self.tensors]

    def put_back(self) -> str:
        """Give tensors the memory again that they had; what has happened to them, '' if nothing has."""
        if [*map(_place, self.tensors)] == self._places:
            return ""
        for tensor, place, before in zip(self.tensors, self._places, self._before, strict=True):
            if _place(tensor) != place:
                tensor.data = before
        return "in its forward a parameter or buffer gets other memory"


def _place(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same, not-a-number included."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
