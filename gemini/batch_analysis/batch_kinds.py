"""Kinds of values: what a value of a step is, seen from its micro-batches; see `gemini.batch_analysis.split_result`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError

if TYPE_CHECKING:
    from gemini.batch_analysis.microbatch_weights import Weight


class SplittingError(GeminiError):
    """A step is not what its proof was about."""


@dataclass(frozen=True)
class Replicate:
    """The same in every micro-batch."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` counts samples: `outer` groups, in each the samples in order, `factor` entries a sample."""

    dim: int
    factor: int = 1
    outer: int = 1

    @property
    def entries(self) -> int:
        """How many entries of the dimension belong to one sample."""
        return self.factor * self.outer

    def take(self, whole: torch.Tensor, start: int, length: int, samples: int) -> torch.Tensor:
        """The part of some samples, one after the other in memory if the whole is: code may view it."""
        if self.outer == 1:
            part = whole.narrow(self.dim, start * self.factor, length * self.factor)
            return part.contiguous() if whole.is_contiguous() else part
        grouped = whole.unflatten(self.dim, (self.outer, samples * self.factor))
        part = grouped.narrow(self.dim + 1, start * self.factor, length * self.factor)
        return part.flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of all parts."""
        if self.outer == 1:
            return torch.cat(list(parts), self.dim)
        grouped = [part.unflatten(self.dim, (self.outer, part.shape[self.dim] // self.outer)) for part in parts]
        return torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class SampleIndices:
    """The numbers of the samples, 0 to n - 1, along a dimension."""

    dim: int


@dataclass(frozen=True)
class RowIndices:
    """Numbers of rows of another tensor, which has `rows` a sample: every micro-batch counts its own from 0."""

    kind: Shard  # how they lie
    rows: int


@dataclass(frozen=True)
class SortedRows:
    """Part of a run in which rows of all samples are sorted, worked on, and put back (experts).

    `role`: `keys` and `rows` are in sorted order; `order` says where they were; `inverse` where they went; `numbers`
    are 0, 1, 2 …; `tally` and `offsets` say how many rows there are of each key.
    """

    role: str
    order: Hashable
    entries: int  # rows a sample
    divisor: int = 1  # an order of rows, of which so many share a source


@dataclass(frozen=True)
class PerMicroBatch:
    """Made in a loop over samples: the whole batch has one for every micro-batch, made of its samples alone."""


@dataclass(frozen=True)
class Partial:
    """Additive over micro-batches."""


@dataclass(frozen=True)
class WeightedPartial:
    """A mean over micro-batches, weighted by a share."""

    share: Weight


@dataclass(frozen=True)
class Opaque:
    """Not to be had from micro-batches, and why."""

    reason: str


Kind = Replicate | Shard | SampleIndices | RowIndices | SortedRows | PerMicroBatch | Partial | WeightedPartial | Opaque
