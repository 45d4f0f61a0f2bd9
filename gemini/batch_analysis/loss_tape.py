"""The tape: what a program did with the outputs of its model, written down to be done elsewhere and later.

    logits = model(x)                        values 0 …       tensors of the output, in its order
    loss = F.cross_entropy(logits, y)        values n, n+1    the operand y, the result
    (loss / 4).backward()                    value n+2        the root

Every tensor has a number. Operands are real tensors that the program had; ops name the values they read, and their
results get numbers in turn, so a tape is in order of execution. Running the ops again on real outputs gives what the
program would have computed: an op keeps the region it was called in.

An op that writes to a value in place is recorded only where nothing else shares that value's memory, so the ops that a
value needs can be told from numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gemini.ir.autograd_modes import Region
from gemini.ir.op_targets import find_op, op_name
from gemini.ir.pytree import Form, Literal, leaves, refs


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor that has no contents yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...] | None = None  # None: contiguous

    @staticmethod
    def of(tensor: torch.Tensor) -> Meta:
        """Of a tensor."""
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())

    def is_scalar(self) -> bool:
        """Whether `backward()` can begin here."""
        return self.requires_grad and math.prod(self.shape) == 1


def literal_type_key(literal: Any) -> Any:
    """What tells literals apart that Python holds for equal, and torch does not: 1, 1.0 and True, 0.0 and -0.0."""
    kind = type(literal)
    return (kind, str(literal)) if kind is complex or (kind is float and not literal) else kind


class _Kind(tuple[Any, ...]):
    """Deep, and looked up in every step: its hash is computed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Op:
    """One call of a function of torch, a method of Tensor, or a custom autograd function."""

    function: Callable[..., Any]
    form: Form  # of (args, kwargs); Ref.node is the number of a value
    region: Region
    results: tuple[int, ...]  # numbers of the tensors in what it returns, in their order
    writes: int | None = None  # the value it changes in place; its later contents are results[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # Some functions of torch cannot be pickled: they go by the name under which torch offers them.
        name = op_name(self.function)
        function = name if name.startswith("torch.") else self.function
        return _unpickle_op, (function, self.form, self.region, self.results, self.writes)

    @cached_property
    def kind(self) -> Hashable:
        """What tells it from other ops."""
        kinds = tuple(literal_type_key(leaf.value) for leaf in leaves(self.form) if isinstance(leaf, Literal))
        return _Kind((self.function, self.form, kinds, self.region, self.results, self.writes))

    @cached_property
    def _read(self) -> tuple[int, ...]:
        return tuple(ref.node for ref in refs(self.form))

    def reads(self) -> tuple[int, ...]:
        """The numbers of the values it is given."""
        return self._read


@dataclass
class Tape:
    """Outputs of a call, operands, and the ops on them so far."""

    outputs: int  # how many tensors the model's output holds: values 0 … outputs - 1
    metas: list[Meta]  # of every value
    # As they were when they were used: copies, but for parameters, which cannot change before the step is done. One
    # that requires a gradient stands for the program's own tensor in the program's graph.
    operands: dict[int, torch.Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def signature(self) -> Hashable:
        """Equal for tapes that differ in nothing but contents of operands."""
        return self.outputs, tuple(self.metas), tuple(self.operands), tuple(op.kind for op in self.ops)

    def ops_needed_for(self, *values: int) -> list[int]:
        """The ops that values depend on, in order; writes to what they read included.

        Values that are wanted together must be asked for together: ops that write to others have to keep their place.
        """
        wanted, found = set(values), []
        for at in range(len(self.ops) - 1, -1, -1):
            op = self.ops[at]
            if wanted & {*op.results, *(() if op.writes is None else (op.writes,))}:
                found.append(at)
                wanted |= set(op.reads())
        return found[::-1]

    def makers(self) -> dict[int, int]:
        """The op that made each value that is no output and no operand."""
        return {result: at for at, op in enumerate(self.ops) for result in op.results}


def _unpickle_op(function: Any, *rest: Any) -> Op:
    return Op(find_op(function) if isinstance(function, str) else function, *rest)
