"""Micro-batch weights: factors or replacements for the result of a node or tape op in a micro-batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gemini.batch_analysis.batch_kinds import Shard, SplittingError
from gemini.ir.pytree import MappingForm, SequenceForm


@dataclass(frozen=True)
class WrittenValue:
    """The contents of a value after some in-place writes."""

    value: Hashable
    writes: tuple[int, ...]  # nodes


class PrecomputedValues(Protocol):
    """Values that can be computed before a step, from its inputs and operands."""

    def value(self, key: Hashable) -> torch.Tensor:
        """Return the whole-batch contents of a value: a `Ref`, a `WrittenValue`, or ("tape", number)."""

    def changed_branch(self) -> str:
        """Return the branch of a rolled graph's Python that differs from the capture; '' if none does."""


@dataclass(frozen=True)
class Weight:
    """Factors of a result, one per micro-batch; this one: its fraction of the samples."""

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """Return one factor per micro-batch of these sizes."""
        total = sum(sizes)
        return [size / total for size in sizes]

    def needs(self) -> tuple[Hashable, ...]:
        """Return the values that must be known."""
        return ()


@dataclass(frozen=True)
class UniformWeight(Weight):
    """1 / M for each of M micro-batches."""

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """Return 1 / M each."""
        return [1 / len(sizes)] * len(sizes)


@dataclass(frozen=True)
class CountWeight(Weight):
    """M: turns a sum into a mean of micro-batches, so that a constant can be added to it."""

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """Return M each."""
        return [float(len(sizes))] * len(sizes)


@dataclass(frozen=True)
class TargetWeight(Weight):
    """The fraction of the targets that count: all but `ignore`, each with the weight of its class."""

    target: Hashable
    kind: Shard
    ignore: int | None
    weight: Hashable | None = None
    smoothed: bool = False  # smoothed labels: a target of weight 0 contributes too

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:
        """Return the weight of each micro-batch's targets relative to all; nan where no target counts at all."""
        target = known.value(self.target)
        weight = None if self.weight is None else known.value(self.weight).detach().double()
        all_count = self.ignore is None or _is_without(target, self.ignore)
        heavy, start, total = [], 0, sum(sizes)
        if weight is None and all_count and target.numel():
            return [size / total for size in sizes]
        for size in sizes:
            part = self.kind.take(target, start, size, total)
            start += size
            if not all_count:
                part = part[part != self.ignore]
            heavy.append(float(part.numel()) if weight is None else float(weight[part].sum()))
            if self.smoothed and part.numel() and not heavy[-1]:
                raise SplittingError("the targets of a micro-batch weigh nothing, but their smoothed labels do")
        whole = sum(heavy)
        # 0 / 0 on the whole batch: every mean is nan, and so must be their sum.
        return [one / whole for one in heavy] if whole else [float("nan")] * len(sizes)

    def needs(self) -> tuple[Hashable, ...]:
        """Return the targets, and the class weights."""
        return (self.target,) if self.weight is None else (self.target, self.weight)


@dataclass(frozen=True)
class WholeValue(Weight):
    """Not a factor: the result is replaced by that of the whole batch, known before the step."""

    source: Hashable

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:
        """Return the value itself, as plain numbers, for every micro-batch."""
        return [("whole", known.value(self.source).detach().tolist())] * len(sizes)

    def needs(self) -> tuple[Hashable, ...]:
        """Return the value."""
        return (self.source,)


@dataclass(frozen=True)
class PartValue(Weight):
    """Not a factor: the result is replaced by the samples' part of that of the whole batch, known before the step."""

    source: Hashable
    kind: Shard

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:
        """Return the part itself, as plain numbers, for every micro-batch."""
        whole, total = known.value(self.source).detach(), sum(sizes)
        rows, each = whole.shape[self.kind.dim], self.kind.entries
        if rows != total * each:
            raise SplittingError(f"a tensor has {rows} rows for {total} samples, and had {each} per sample")
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        parts = [self.kind.take(whole, start, size, total) for start, size in zip(starts, sizes, strict=True)]
        return [("whole", self.own(*one).tolist()) for one in zip(parts, starts, sizes, strict=True)]

    def own(self, part: torch.Tensor, start: int, size: int) -> torch.Tensor:  # noqa: ARG002
        """Return the part of some samples, as their micro-batch needs it."""
        return part

    def needs(self) -> tuple[Hashable, ...]:
        """Return the value."""
        return (self.source,)


@dataclass(frozen=True)
class OwnRows(PartValue):
    """A part that holds row indices, `rows` per sample, none of another sample."""

    rows: int = 1

    def own(self, part: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """Return the indices counted from the first row of these samples."""
        found = part - start * self.rows
        if found.numel() and (int(found.min()) < 0 or int(found.max()) >= size * self.rows):
            raise SplittingError("row indices of one sample refer to rows of another")
        return found


@dataclass(frozen=True)
class SeveralWeights(Weight):
    """Weights of the tensors that one function returns, by position."""

    shares: tuple[tuple[int, Weight], ...]

    def weights(self, known: PrecomputedValues, sizes: Sequence[int]) -> list[Any]:
        """Return the weights of all, for every micro-batch."""
        found = [(place, share.weights(known, sizes)) for place, share in self.shares]
        return [("each", [(place, each[mid]) for place, each in found]) for mid in range(len(sizes))]

    def needs(self) -> tuple[Hashable, ...]:
        """Return the values that any of them needs."""
        return tuple(key for _, share in self.shares for key in share.needs())


def _is_without(target: torch.Tensor, number: int) -> bool:
    """Return whether a number does not occur in a tensor; comparing with the minimum is usually enough."""
    is_less = target.numel() > 0 and number < target.min().item()
    return is_less or bool((target != number).all())


class _Nothing(torch.autograd.Function):  # type: ignore[misc]
    """Return 0 without a gradient: a gradient of 0 would become nan in the backward of 0 / 0."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:  # noqa: ARG004
        return None


def weigh(value: Any, weight: Any) -> Any:
    """Return the weighted result of a node or op in a micro-batch: times a number, or replaced by ("whole", numbers).

    ("each", weights by position) are those of several results. A micro-batch in which nothing counts has the mean nan
    and the weight 0: it contributes nothing, and no gradient.
    """
    if isinstance(weight, tuple) and weight[0] == "each":
        parts = list(value)
        for place, one in weight[1]:
            parts[place] = weigh(parts[place], one)
        return type(value)(parts)
    if isinstance(weight, tuple):
        return torch.tensor(weight[1], dtype=value.dtype, device=value.device)
    if weight == 1.0:
        return value
    return value * weight if weight else _Nothing.apply(value)


def replace_part(form: Any, path: tuple[int, ...], part: Any) -> Any:
    """Return a form with another part at a path."""
    if not path:
        return part
    items = list(form.items)
    if isinstance(form, MappingForm):
        key, old = items[path[0]]
        items[path[0]] = (key, replace_part(old, path[1:], part))
    elif isinstance(form, SequenceForm):
        items[path[0]] = replace_part(items[path[0]], path[1:], part)
    return replace(form, items=tuple(items))
