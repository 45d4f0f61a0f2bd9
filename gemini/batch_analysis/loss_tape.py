"""Loss tape: the ops of a script on the outputs of its model, recorded to run later, in other processes.

    logits = model(x)                        values 0 …       tensors of the output, in its order
    loss = F.cross_entropy(logits, y)        values n, n+1    the operand y, the result
    (loss / 4).backward()                    value n+2        the root

Every tensor has a number. Operands are real tensors of the script; ops refer to the values they read, and their results
are numbered in turn, so a tape is in order of execution. An op stores the autograd modes it was called in, so running
it on real outputs yields the result that the script would have computed.

An op that writes a value in place is recorded only where nothing else shares the memory of that value, so the ops that
a value needs follow from numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from gemini.ir.autograd_modes import Region
from gemini.ir.op_targets import find_op, op_name
from gemini.ir.pytree import Form, Literal, leaves, refs


@dataclass(frozen=True)
class Meta:
    """Shape, type and device of a tensor that has no contents yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...] | None = None  # None: contiguous

    @staticmethod
    def of(tensor: torch.Tensor) -> Meta:
        """Return the metadata of a tensor."""
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())

    def has_same_kind(self, other: Meta) -> bool:
        """Return whether both are equal but for strides, which may differ between runs: those of an empty tensor do."""
        return replace(self, strides=None) == replace(other, strides=None)

    def is_scalar(self) -> bool:
        """Return whether `backward()` can begin at the tensor."""
        return self.requires_grad and math.prod(self.shape) == 1


def literal_type_key(literal: Any) -> Any:
    """Return a key that separates literals equal in Python but not in torch: 1, 1.0 and True, 0.0 and -0.0."""
    kind = type(literal)
    return (kind, str(literal)) if kind is complex or (kind is float and not literal) else kind


class _Kind(tuple[Any, ...]):
    """A deep tuple, looked up in every step: its hash is computed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Op:
    """One call of a function of torch, a method of Tensor, or a custom autograd function."""

    function: Callable[..., Any]
    form: Form  # of (args, kwargs); Ref.node numbers a value
    region: Region
    results: tuple[int, ...]  # numbers of the tensors it returns, in order
    writes: int | None = None  # the value it changes in place; its contents afterwards are results[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Some functions of torch cannot be pickled: they are sent by their public name.
        name = op_name(self.function)
        function = name if name.startswith("torch.") else self.function
        return _unpickle_op, (function, self.form, self.region, self.results, self.writes)

    @cached_property
    def kind(self) -> Hashable:
        """The identity of the op, for comparison with other ops."""
        kinds = tuple(literal_type_key(leaf.value) for leaf in leaves(self.form) if isinstance(leaf, Literal))
        return _Kind((self.function, self.form, kinds, self.region, self.results, self.writes))

    @cached_property
    def _read(self) -> tuple[int, ...]:
        return tuple(ref.node for ref in refs(self.form))

    def reads(self) -> tuple[int, ...]:
        """Return the numbers of the values it reads."""
        return self._read


@dataclass
class Tape:
    """The outputs of a call, operands, and the ops on them so far."""

    outputs: int  # number of tensors in the model's output: values 0 … outputs - 1
    metas: list[Meta]  # of every value
    # Copies made when they were used, except parameters, which cannot change before the step ends. One that requires a
    # gradient represents the script's tensor in the script's autograd graph.
    operands: dict[int, torch.Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def signature(self) -> Hashable:
        """Return a key that is equal for tapes which differ only in contents of operands."""
        return self.outputs, tuple(self.metas), tuple(self.operands), tuple(op.kind for op in self.ops)

    def ops_needed_for(self, *values: int) -> list[int]:
        """Return the indices of the ops that values depend on, in order, writes to their inputs included.

        Values that are needed together must be passed together, so that writes stay in order.
        """
        wanted, found = set(values), []
        for at in range(len(self.ops) - 1, -1, -1):
            op = self.ops[at]
            if wanted & {*op.results, *(() if op.writes is None else (op.writes,))}:
                found.append(at)
                wanted |= set(op.reads())
        return found[::-1]

    def makers(self) -> dict[int, int]:
        """Return the index of the op that makes each value which is no output and no operand."""
        return {result: at for at, op in enumerate(self.ops) for result in op.results}


def _unpickle_op(function: Any, *rest: Any) -> Op:
    return Op(find_op(function) if isinstance(function, str) else function, *rest)
