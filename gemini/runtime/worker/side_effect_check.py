"""Side-effect check: what a module must not do in a worker is detected in every call and undone.

A worker has copies of the arguments and of the module's Python state. A module that changes them (a counter, an input
written in place), gives a parameter other memory (`weight.data = …`) or uses Python's generators would leave the
controller's unchanged, and the model would silently differ. Such a call is refused, with the buffers restored, and
runs in the controller. Mutable objects among the arguments that are equivalent on both sides (a key-value cache) may
change: the changes are sent back. A call that raises keeps its buffers half written, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.guards.module_state import ModuleState
from gemini.pipe.live_stages import EDITED
from gemini.purity.proof import PurityProof, prove_purity
from gemini.runtime.argument_mutations import ArgumentObjects, Contents
from gemini.runtime.placeholder_tensors import PLACEHOLDER_USED, PlaceholderUse
from gemini.runtime.transport.serialization import ClassTable
from gemini.runtime.worker.host_rng_check import HostRngCheck
from gemini.snapshot.attribute_values import ContentsSnapshot


class Refusal(Exception):
    """A module did what cannot be done remotely."""


class HostRngUsed(Refusal):
    """It used Python's or NumPy's random numbers."""


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
    """Checks the calls of one module."""

    def __init__(self, module: nn.Module, classes: ClassTable) -> None:
        self.module, self.classes = module, classes
        self.buffers = BufferWrites(module)
        self.memory = TensorBackup([*module.parameters(), *self.buffers.buffers])
        self.snapshot = ModuleState(module)
        self.reads = WorkerReads(module)
        self.arguments = ArgumentObjects((), {}, classes)  # mutable objects of the last call
        self.changes: dict[int, Contents] = {}  # and their changes
        self._saved: list[tuple[int, torch.Tensor]] = []  # buffers before the last call
        HOST_RNG.was_used()  # numbers used while its classes were imported do not count

    def run(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        arguments: ArgumentObjects,
    ) -> Any:
        """Run a call; raise Refusal, with the buffers restored, if it had side effects that cannot be transferred."""
        learns = self.buffers.written is None
        self._saved = self.buffers.save()
        versions = [tensor._version for tensor in inputs]
        self.arguments = arguments
        self.memory.save()
        failure: BaseException | None = None
        result = None
        try:
            result = forward(*args, **kwargs)
        except BaseException as error:
            failure = error
        has_moved = self.memory.restore()
        if learns:
            self._saved = self.buffers.find_written(self._saved)
            self.buffers.written = {at for at, _ in self._saved} if failure is None else None
        has_drawn = HOST_RNG.was_used()
        reason = PLACEHOLDER_USED if PlaceholderUse.was_used() else self._fault(inputs, versions, failure)
        reason = reason or has_moved
        if reason or has_drawn:
            self.undo()
            raise Refusal(reason) if reason else HostRngUsed("it uses Python's or NumPy's random numbers")
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback refers to this frame
        return result

    def undo(self) -> None:
        """Restore the buffers to what they were before the last call."""
        saved, self._saved = self._saved, []
        self.buffers.restore(saved)

    def _fault(self, inputs: list[torch.Tensor], versions: list[int], failure: BaseException | None) -> str:
        if [tensor._version for tensor in inputs] != versions:
            return "it writes to its inputs"
        changes = self.arguments.changes() if self.arguments.objects else {}
        if isinstance(changes, str):
            return changes
        if changes and failure is not None:
            return "it changes an object among its arguments, and raises"
        self.changes = changes
        changed = self.find_change()
        return f"in its forward {changed}" if changed else ""

    def find_change(self) -> str:
        """Return what has changed of the module, and of what its code reads, since the worker received it."""
        return self.snapshot.find_change() or self.reads.find_change()


class WorkerReads:
    """The values outside a module that its code reads, as this worker has them: its forward must not change them."""

    def __init__(self, module: nn.Module) -> None:
        proof = PurityProof("", []) if EDITED in vars(module) else prove_purity(module)
        self._reason, self._contents = proof.reason, ContentsSnapshot(entry.now() for entry in proof.entries)

    def find_change(self) -> str:
        """Return what the forward has changed, and restore it; '' if nothing has changed."""
        changed = self._contents.restore()
        if self._reason:  # the copy differs from the original
            return f"in a worker, {self._reason}"
        return f"its code changes a {changed} that is not part of the model" if changed else ""


class TensorBackup:
    """The memory positions of tensors that both sides have."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._positions: list[Any] = []
        self._before: list[torch.Tensor] = []  # tensors on their current memory

    def save(self) -> None:
        """Record the current positions."""
        positions = [*map(_position, self.tensors)]
        if positions != self._positions:
            self._positions, self._before = positions, [tensor.data for tensor in self.tensors]

    def restore(self) -> str:
        """Give tensors their former memory back; return what happened to them, '' if nothing did."""
        if [*map(_position, self.tensors)] == self._positions:
            return ""
        for tensor, position, before in zip(self.tensors, self._positions, self._before, strict=True):
            if _position(tensor) != position:
                tensor.data = before
        return "in its forward a parameter or buffer gets other memory"


def _position(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values, NaN included."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
