"""Values of a call: their numbers, aliasing, and the deferred tensors that stand for them.

A deferred tensor knows its value by number; the references back are weak, so that the script decides how long a value
is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch

from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.runtime.deferred.contract import OutputSpec
from gemini.runtime.deferred.deferred_tensor import DeferredTensor
from gemini.runtime.deferred.input_copies import InputCopies
from gemini.runtime.deferred.tape_aliases import AliasGroups

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall

if TYPE_CHECKING:
    pass


class CallValues:
    """Outputs of a call, operands, and results of recorded ops."""

    def __init__(self, output_spec: OutputSpec) -> None:
        self.tape = Tape(len(output_spec.metas), list(output_spec.metas))
        self.nodes = dict(enumerate(output_spec.nodes))  # grad_fn names of values
        self._copies = InputCopies()
        self._groups = AliasGroups(output_spec.shared)
        self._made: dict[int, weakref.ref[DeferredTensor]] = {}
        self._operands: dict[int, int] = {}  # numbers of operands, by identity of the copy

    def make(self, number: int, meta: Meta) -> DeferredTensor:
        """Create the deferred tensor of a value."""
        made = DeferredTensor.make(cast("PendingCall", self), number, meta)
        self._made[number] = weakref.ref(made)
        return made

    def rebind(self, tensor: DeferredTensor, number: int) -> None:
        """Bind a tensor to another value: it was written in place."""
        del self._made[tensor._value]
        tensor._value = number
        self._made[number] = weakref.ref(tensor)

    def value_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a deferred tensor, or of an operand with its present contents."""
        if isinstance(tensor, DeferredTensor):
            return tensor._value
        copy = self._copies.of(tensor)
        if id(copy) not in self._operands:
            number = self._operands[id(copy)] = self.new_value(Meta.of(copy), ())
            self.tape.operands[number] = copy
        return self._operands[id(copy)]

    def new_value(self, meta: Meta, shares: Iterable[int]) -> int:
        """Number a value that shares memory with others."""
        self.tape.metas.append(meta)
        number = len(self.tape.metas) - 1
        self._groups.add(number, shares)
        return number

    def is_unaliased(self, number: int) -> bool:
        """Whether no other value shares its memory."""
        return self._groups.is_unaliased(number)

    def is_independent(self, number: int) -> bool:
        """Whether a value may be computed apart: no reachable value shares its memory, except its own results."""
        return self._groups.sources(number).isdisjoint(self.alive())

    def alive(self) -> list[int]:
        """Return the values that the script can still read and that are not real yet."""
        return [number for number, one in self._deferred_tensors() if one._real is None]

    def _deferred_tensors(self) -> list[tuple[int, DeferredTensor]]:
        """Return the tensors that still stand for values, with their numbers."""
        found = ((number, ref()) for number, ref in self._made.items())
        return [(number, one) for number, one in found if type(one) is DeferredTensor]

    def tensor(self, number: int) -> DeferredTensor | None:
        """Return the tensor of a value while the script holds it; it may be an ordinary one by then."""
        return self._made[number]() if number in self._made else None

    def _release(self) -> None:
        """Free copies and tape: nothing is computed from them any more."""
        self._copies, self._operands, self.tape = InputCopies(), {}, Tape(0, [])
