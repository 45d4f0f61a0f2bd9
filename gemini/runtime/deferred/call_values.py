"""The values of a call: numbers, what shares memory, and the deferred tensors that stand for them.

A deferred tensor knows its value by number; here are only weak references back, so that the program decides how long
a value is wanted.
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
    """The outputs of a call, operands, and what was made of them."""

    def __init__(self, output_spec: OutputSpec) -> None:
        self.tape = Tape(len(output_spec.metas), list(output_spec.metas))
        self.nodes = dict(enumerate(output_spec.nodes))  # what values are made by, as torch calls it
        self._copies = InputCopies()
        self._groups = AliasGroups(output_spec.shared)
        self._made: dict[int, weakref.ref[DeferredTensor]] = {}
        self._operands: dict[int, int] = {}  # numbers of operands, by identity of the copy

    def make(self, number: int, meta: Meta) -> DeferredTensor:
        """The deferred tensor of a value."""
        made = DeferredTensor.make(cast("PendingCall", self), number, meta)
        self._made[number] = weakref.ref(made)
        return made

    def rebind(self, tensor: DeferredTensor, number: int) -> None:
        """Its contents are those of another value from now on: it has been written to."""
        del self._made[tensor._value]
        tensor._value = number
        self._made[number] = weakref.ref(tensor)

    def value_number(self, tensor: torch.Tensor) -> int:
        """The number of a deferred tensor, or of an operand as it is now."""
        if isinstance(tensor, DeferredTensor):
            return tensor._value
        copy = self._copies.of(tensor)
        if id(copy) not in self._operands:
            number = self._operands[id(copy)] = self.new_value(Meta.of(copy), ())
            self.tape.operands[number] = copy
        return self._operands[id(copy)]

    def new_value(self, meta: Meta, shares: Iterable[int]) -> int:
        """A number for a value that shares memory with these."""
        self.tape.metas.append(meta)
        number = len(self.tape.metas) - 1
        self._groups.add(number, shares)
        return number

    def is_unaliased(self, number: int) -> bool:
        """Whether no other value shares its memory."""
        return self._groups.is_unaliased(number)

    def is_independent(self, number: int) -> bool:
        """Whether it may be computed apart: the program can read nothing else that a write to it would show in, but
        what is made of it."""
        return self._groups.sources(number).isdisjoint(self.alive())

    def alive(self) -> list[int]:
        """The values that the program can still read and that are not real yet."""
        return [number for number, one in self._deferred_tensors() if one._real is None]

    def _deferred_tensors(self) -> list[tuple[int, DeferredTensor]]:
        """The tensors that stand for values and have not become them, with their numbers."""
        found = ((number, ref()) for number, ref in self._made.items())
        return [(number, one) for number, one in found if type(one) is DeferredTensor]

    def tensor(self, number: int) -> DeferredTensor | None:
        """The deferred tensor of a value, as long as the program has it; it may be an ordinary one by now."""
        return self._made[number]() if number in self._made else None

    def _release(self) -> None:
        """Nothing can be computed any more."""
        self._copies, self._operands, self.tape = InputCopies(), {}, Tape(0, [])
