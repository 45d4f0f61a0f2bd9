"""Batch kinds: how the values of the micro-batches make up a value of the whole batch, in DTensor terms.

`gemini.batch_analysis.split_result` tabulates them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError

if TYPE_CHECKING:
    from gemini.batch_analysis.microbatch_weights import Weight


class SplittingError(GeminiError):
    """A step violates an assumption of its proof."""


@dataclass(frozen=True)
class Replicate:
    """Equal in every micro-batch."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` counts samples: `outer` groups, in each the samples in order, `factor` entries per sample."""

    dim: int
    factor: int = 1
    outer: int = 1

    @property
    def entries(self) -> int:
        """The entries of the dimension per sample."""
        return self.factor * self.outer

    def take(self, whole: torch.Tensor, start: int, length: int, samples: int) -> torch.Tensor:
        """Return the part of some samples, contiguous if the whole is: user code may view it."""
        if self.outer == 1:
            part = whole.narrow(self.dim, start * self.factor, length * self.factor)
            return part.contiguous() if whole.is_contiguous() else part
        grouped = whole.unflatten(self.dim, (self.outer, samples * self.factor))
        part = grouped.narrow(self.dim + 1, start * self.factor, length * self.factor)
        return part.flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate the parts of all micro-batches."""
        if self.outer == 1:
            return torch.cat(list(parts), self.dim)
        grouped = [part.unflatten(self.dim, (self.outer, part.shape[self.dim] // self.outer)) for part in parts]
        return torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class SampleIndices:
    """The indices of the samples, 0 to n - 1, along a dimension."""

    dim: int


@dataclass(frozen=True)
class RowIndices:
    """Indices of rows of another tensor that has `rows` per sample: every micro-batch counts its rows from 0."""

    kind: Shard  # of the indices themselves
    rows: int


@dataclass(frozen=True)
class SortedRows:
    """Part of a region in which the rows of all samples are sorted, processed and restored to their order (experts).

    `role`: `keys` and `rows` are in sorted order; `order` holds their original places, `inverse` those after sorting;
    `numbers` are 0, 1, 2 …; `tally` and `offsets` count the rows of each key.
    """

    role: str
    order: Hashable
    entries: int  # rows per sample
    divisor: int = 1  # rows per source, in an order


@dataclass(frozen=True)
class PerMicroBatch:
    """Made in a loop over samples: the whole batch has one value per micro-batch, made of its samples alone."""


@dataclass(frozen=True)
class Partial:
    """Additive over micro-batches."""


@dataclass(frozen=True)
class WeightedPartial:
    """A mean over micro-batches: additive after multiplication by a weight."""

    share: Weight


@dataclass(frozen=True)
class Opaque:
    """Not computable from micro-batches, for `reason`."""

    reason: str


Kind = Replicate | Shard | SampleIndices | RowIndices | SortedRows | PerMicroBatch | Partial | WeightedPartial | Opaque
