"""Conditions: what a proof supposes of the contents of a batch, looked at before every step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gemini.batch_analysis.batch_kinds import Shard
from gemini.batch_analysis.microbatch_weights import PrecomputedValues


@dataclass(frozen=True)
class EqualMaskCounts:
    """What must hold in every step: of a mask, every sample has so many entries that are true (or none has any)."""

    mask: Hashable
    kind: Shard
    entries: int
    or_none: bool = False

    def violation(self, known: PrecomputedValues, samples: int) -> str:
        """How it does not hold; '' if it does."""
        mask = known.value(self.mask).detach()
        counts = [int(self.kind.take(mask, at, 1, samples).count_nonzero()) for at in range(samples)]
        wrong = next((at for at, count in enumerate(counts) if count != self.entries), None)
        if wrong is None or (self.or_none and not any(counts)):
            return ""
        return (
            f"a mask selects {counts[wrong]} entries of sample {wrong}, and {self.entries} of those it was proven for"
        )

    def needs(self) -> tuple[Hashable, ...]:
        """The mask."""
        return (self.mask,)


@dataclass(frozen=True)
class AllEntriesEqual:
    """What must hold in every step: all entries of a tensor are this number."""

    tensor: Hashable
    number: int

    def violation(self, known: PrecomputedValues, samples: int) -> str:  # noqa: ARG002
        """How it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        wrong = found[found != self.number]
        return f"a number of entries is {int(wrong[0])}, and {self.number} in what was proven" if wrong.numel() else ""

    def needs(self) -> tuple[Hashable, ...]:
        """The tensor."""
        return (self.tensor,)


@dataclass(frozen=True)
class SameContents:
    """What must hold in every step: an input has, in every micro-batch, the contents that it was captured with."""

    tensor: Hashable
    kind: Shard | None  # None: it has no samples
    numbers: tuple[Any, ...]
    samples: int  # of a micro-batch

    def violation(self, known: PrecomputedValues, samples: int) -> str:
        """How it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        starts = range(0, samples, self.samples) if self.kind is not None else (0,)
        for start in starts:
            part = found if self.kind is None else self.kind.take(found, start, self.samples, samples)
            if tuple(part.flatten().tolist()) != self.numbers:
                return f"the Python of the model branches on an input of which samples from {start} on are others"
        return ""

    def needs(self) -> tuple[Hashable, ...]:
        """The input."""
        return (self.tensor,)


@dataclass(frozen=True)
class SameBranches:
    """What must hold in every step: the Python of every micro-batch, and of the whole batch, goes the captured way."""

    def violation(self, known: PrecomputedValues, samples: int) -> str:  # noqa: ARG002
        """How it does not hold; '' if it does."""
        return known.changed_branch()

    def needs(self) -> tuple[Hashable, ...]:
        """Nothing in particular."""
        return ()


Condition = EqualMaskCounts | AllEntriesEqual | SameContents | SameBranches
