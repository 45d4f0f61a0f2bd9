"""Op calls: the input of a rule, an op with the kind and shape of every tensor in place of its contents.

Shapes are those of a run on `samples` samples. In a graph that number occurs nowhere else, so a size that counts
samples cannot be confused with another; numbers of the model's Python that count samples are `SampleCount`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from gemini.batch_analysis.assumptions import Condition, EqualMaskCounts
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, SampleIndices, Shard, WeightedPartial

# The symbolic number of samples in shapes of a graph: a prime that no other size has.
SAMPLES = 1_000_003


class AnalysisRefused(Exception):
    """An op whose result does not follow from micro-batches; the message is the reason."""


class DecisionDemand(Exception):
    """An earlier decision must change: the interpretation restarts there."""

    def __init__(self, key: Hashable, decision: Any) -> None:
        super().__init__(f"{key}: {decision}")
        self.key, self.decision = key, decision


@dataclass(frozen=True)
class RowIndexDecision:
    """A decision: a value holds row indices of a tensor with this number of rows per sample."""

    rows: int


class SampleCount(int):
    """A plain number that is a multiple of the number of samples."""


@dataclass(frozen=True)
class UnknownNumber:
    """A number that depends on the number of samples, but is no multiple of it."""


@dataclass(frozen=True)
class DataNumber:
    """A number read from data that is equal in every micro-batch."""


@dataclass(frozen=True)
class Repeats:
    """The value whose entries a tensor repeats, each a fixed number of times, sample by sample."""

    key: Hashable
    kind: Shard
    times: int


@dataclass(frozen=True)
class TensorValue:
    """A tensor."""

    key: Hashable
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    known: bool = False  # can be computed before the step
    operand: bool = False  # of a tape, not yet combined with samples
    numbers: bool = False  # an operand that holds 0, 1, 2 … up to the number of samples
    sized: int | str | None = None  # the dimension whose size grows with the batch; "?": unknown
    repeats: Repeats | None = None  # of a value known before the step
    invariance: Any = None  # the part that is equal for all samples

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def is_constant(self) -> bool:
        """Whether it is equal in all micro-batches."""
        return isinstance(self.kind, Replicate)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum or a mean over the batch."""
        return isinstance(self.kind, (Partial, WeightedPartial))


@dataclass(frozen=True)
class ResultMeta:
    """Shape and type of a result, and in a graph the dimension that grows with the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    batch: int | str | None = None  # "?": not observed


@dataclass
class OpCall:
    """One op."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    results: list[ResultMeta]
    traced: bool  # sizes of the batch are `Count`, not plain numbers
    random: bool = False
    index: Hashable = None  # of the analysis step
    sizes: dict[tuple[int, ...], int] = field(default_factory=dict)  # plain numbers that count samples (tape)
    assumed: set[Hashable] = field(default_factory=set)  # operands that must hold 0, 1, 2 … in every step
    conditions: list[Condition] = field(default_factory=list)  # assumptions about every step
    least: int = 1  # fewest samples of a micro-batch

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[at] if len(self.args) > at else default

    def tensors(self) -> list[TensorValue]:
        """Return all tensor arguments."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, TensorValue)]

    def out(self) -> ResultMeta:
        """Its first result."""
        return self.results[0]

    @property
    def first(self) -> TensorValue:
        """Its first argument, which must be a tensor."""
        value = self.argument(0, "input")
        if not isinstance(value, TensorValue):
            raise AnalysisRefused(f"{self.name} of an argument that is no tensor")
        return value

    def only(self, *allowed: Any) -> None:
        """Refuse tensors that vary with the batch other than these."""
        for value in self.tensors():
            if not value.is_constant and not any(value is one for one in allowed):
                raise AnalysisRefused(f"{self.name} with an argument that depends on the batch")

    def constant(self, value: Any) -> None:
        """Refuse anything that varies with the batch."""
        for leaf in leaves(value):
            if (isinstance(leaf, TensorValue) and not leaf.is_constant) or isinstance(
                leaf, (SampleCount, UnknownNumber)
            ):
                raise AnalysisRefused(f"{self.name} with an argument that depends on the batch")

    def sample(self, value: TensorValue, what: str = "") -> Shard:
        """Return the kind of a sharded tensor; refuse any other."""
        if isinstance(value.kind, Shard):
            return value.kind
        raise AnalysisRefused(self.refusal(value, what))

    def refusal(self, value: TensorValue, what: str = "") -> str:
        """Return why a tensor is not of the right kind."""
        if isinstance(value.kind, Opaque):
            return value.kind.reason
        words = {
            Partial: "a sum over the batch",
            WeightedPartial: "a mean over the batch",
            SampleIndices: "numbers of samples",
        }
        return f"{what or self.name} of {words.get(type(value.kind), 'a tensor without samples')}"

    def must_be(self, value: TensorValue, kind: Shard) -> None:
        """Require that a tensor is of this kind, or an operand that can be sharded accordingly."""
        if value.kind == kind:
            return
        if value.operand and value.is_constant and value.shape[kind.dim] == self.samples * kind.entries:
            if kind.factor < 1:
                raise AnalysisRefused(f"{self.name} with an operand whose samples are not contiguous")
            raise DecisionDemand(value.key, kind)
        raise AnalysisRefused(f"{self.name} with a tensor that is not split as the samples are")

    def each(self, mask: TensorValue, kind: Shard, entries: int, or_none: bool = False) -> None:
        """Assume this number of true entries per sample of a mask; it must be known before the step."""
        source = mask.repeats
        if mask.known:
            self.conditions.append(EqualMaskCounts(mask.key, kind, entries, or_none))
        elif source is not None and entries % source.times == 0:
            self.conditions.append(EqualMaskCounts(source.key, source.kind, entries // source.times, or_none))
        else:
            raise AnalysisRefused(f"{self.name} by a mask that is not known before the step")


REPEATING = ("expand", "expand_as", "broadcast_to", "unsqueeze", "contiguous", "clone", "to", "bool")


def repeats(name: str, args: Sequence[Any], made: TensorValue) -> Repeats | None:
    """Return the known value that the result of an op repeats."""
    given = args[0] if args else None
    if (
        name not in REPEATING
        or not isinstance(given, TensorValue)
        or given.dtype != torch.bool
        or made.dtype != torch.bool
    ):
        return None
    if not isinstance(given.kind, Shard) or not isinstance(made.kind, Shard):
        return None
    times = prod(made.shape) // max(prod(given.shape), 1)
    if given.known:
        return Repeats(given.key, given.kind, times)
    return None if given.repeats is None else replace(given.repeats, times=given.repeats.times * times)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nest of arguments."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def axis(dim: int, rank: int) -> int:
    """Return a dimension counted from the front."""
    found = dim + rank if dim < 0 else dim
    if not 0 <= found < max(rank, 1):
        raise AnalysisRefused(f"dimension {dim} of a tensor of {rank}")
    return found


def axes(dims: Any, rank: int) -> tuple[int, ...]:
    """Return dimensions counted from the front; None and () are all of them."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(rank))
    return tuple(axis(dim, rank) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))
