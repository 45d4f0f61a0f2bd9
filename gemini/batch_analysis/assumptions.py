"""Assumptions of a proof about the contents of a batch, checked before every step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gemini.batch_analysis.batch_kinds import Shard
from gemini.batch_analysis.microbatch_weights import PrecomputedValues


@dataclass(frozen=True)
class EqualMaskCounts:
    """In every step each sample has `entries` true entries of a mask; with `or_none`, or no sample has any."""

    mask: Hashable
    kind: Shard
    entries: int
    or_none: bool = False

    def violation(self, known: PrecomputedValues, samples: int) -> str:
        """Return why it does not hold; '' if it does."""
        mask = known.value(self.mask).detach()
        counts = [int(self.kind.take(mask, at, 1, samples).count_nonzero()) for at in range(samples)]
        wrong = next((at for at, count in enumerate(counts) if count != self.entries), None)
        if wrong is None or (self.or_none and not any(counts)):
            return ""
        return f"a mask selects {counts[wrong]} entries of sample {wrong}, and {self.entries} in the captured batch"

    def needs(self) -> tuple[Hashable, ...]:
        """Return the mask."""
        return (self.mask,)


@dataclass(frozen=True)
class AllEntriesEqual:
    """In every step all entries of a tensor equal this number."""

    tensor: Hashable
    number: int

    def violation(self, known: PrecomputedValues, samples: int) -> str:  # noqa: ARG002
        """Return why it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        wrong = found[found != self.number]
        return (
            f"a number of entries is {int(wrong[0])}, and {self.number} in the captured batch" if wrong.numel() else ""
        )

    def needs(self) -> tuple[Hashable, ...]:
        """Return the tensor."""
        return (self.tensor,)


@dataclass(frozen=True)
class SameContents:
    """In every step an input has, in each micro-batch, the contents of the capture."""

    tensor: Hashable
    kind: Shard | None  # None: the input has no batch dimension
    numbers: tuple[Any, ...]
    samples: int  # per micro-batch

    def violation(self, known: PrecomputedValues, samples: int) -> str:
        """Return why it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        starts = range(0, samples, self.samples) if self.kind is not None else (0,)
        for start in starts:
            part = found if self.kind is None else self.kind.take(found, start, self.samples, samples)
            if tuple(part.flatten().tolist()) != self.numbers:
                return f"the model branches on an input whose contents differ from sample {start} on"
        return ""

    def needs(self) -> tuple[Hashable, ...]:
        """Return the input."""
        return (self.tensor,)


@dataclass(frozen=True)
class SameBranches:
    """In every step the Python of each micro-batch, and of the whole batch, takes the captured branches."""

    def violation(self, known: PrecomputedValues, samples: int) -> str:  # noqa: ARG002
        """Return why it does not hold; '' if it does."""
        return known.changed_branch()

    def needs(self) -> tuple[Hashable, ...]:
        """Return no values."""
        return ()


Condition = EqualMaskCounts | AllEntriesEqual | SameContents | SameBranches
