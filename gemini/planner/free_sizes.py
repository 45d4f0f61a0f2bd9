"""Free sizes: how every size in a plan follows from the sizes of a call, learned from two plans.

    call A   x (8, 64)    dropout (0, 4, 64, 64)    flattened 64 × 256        64, 48: a free size, s
    call B   x (8, 48)    dropout (0, 4, 48, 48)    flattened 48 × 256
    rule                  (0, 4, s, s)              256 · s                   call C, x (8, 56): (0, 4, 56, 56), 14336

Dimensions of the inputs whose sizes differ between the calls are free. Those with the same pair of sizes are one free
size, so a later call must have equal sizes there, too. Every other number of the plan is either equal in both, or one
of: a multiple of a free size, a multiple of a product of two, a free size plus a number, a multiple plus a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
_SMALLEST = 2  # torch treats a dimension of one entry, or none, in other ways


@dataclass(frozen=True)
class SizeRule:
    """`factor` · product of the free sizes `sizes` + `offset`."""

    factor: int
    sizes: tuple[int, ...] = ()
    offset: int = 0

    def at(self, values: Sequence[int]) -> int:
        """Return the number for these free sizes."""
        return self.factor * prod(values[at] for at in self.sizes) + self.offset


@dataclass(frozen=True)
class FreeSizes:
    """The free sizes of two calls.

    `places` has the free size of each dimension of each input (None: not free), `pairs` both values of each.
    """

    shapes: tuple[Shape, ...]  # of the first call
    places: tuple[tuple[int | None, ...], ...]
    pairs: tuple[tuple[int, int], ...]

    @staticmethod
    def between(first: Sequence[Shape], second: Sequence[Shape], batch: Sequence[int | None]) -> FreeSizes | None:
        """Return the free sizes of two calls; None where there are none. `batch`: dimensions that count samples."""
        pairs: dict[tuple[int, int], int] = {}
        places = []
        for one, other, samples in zip(first, second, batch, strict=True):
            if len(one) != len(other):
                return None
            differs = [at != samples and size != also for at, (size, also) in enumerate(zip(one, other, strict=True))]
            row = [
                pairs.setdefault(pair, len(pairs)) if free else None
                for pair, free in zip(zip(one, other, strict=True), differs, strict=True)
            ]
            places.append(tuple(row))
        if not pairs or min(map(min, pairs)) < _SMALLEST:
            return None
        return FreeSizes(tuple(first), tuple(places), tuple(pairs))

    def values(self, shapes: Sequence[Shape], batch: Sequence[int | None]) -> tuple[int, ...] | None:
        """Return the free sizes of a call; None where it differs in others, or has a size below two."""
        found: list[int | None] = [None] * len(self.pairs)
        for shape, wanted, row, samples in zip(shapes, self.shapes, self.places, batch, strict=True):
            for at, (size, expected, place) in enumerate(zip(shape, wanted, row, strict=True)):
                if place is None:
                    if at != samples and size != expected:
                        return None
                elif found[place] not in (None, size) or size < _SMALLEST:
                    return None
                else:
                    found[place] = size
        return tuple(size for size in found if size is not None)

    def rule(self, first: int, second: int) -> SizeRule | None:
        """Return the rule of a number that is `first` in the first call and `second` in the other; None for none."""
        if first == second:
            return SizeRule(0, (), first)
        multiples = [
            SizeRule(first // one, (at,))
            for at, (one, other) in enumerate(self.pairs)
            if first % one == 0 and first // one * other == second and first
        ]
        if multiples:
            return min(multiples, key=lambda rule: rule.factor)
        for a, b in itertools.combinations_with_replacement(range(len(self.pairs)), 2):
            one, other = (self.pairs[a][side] * self.pairs[b][side] for side in (0, 1))
            if first % one == 0 and first and first // one * other == second:
                return SizeRule(first // one, (a, b))
        sums = [SizeRule(1, (at,), first - one) for at, (one, other) in enumerate(self.pairs)
                if first - one == second - other]  # fmt: skip
        return min(sums, key=lambda rule: abs(rule.offset)) if sums else self._line(first, second)

    def _line(self, first: int, second: int) -> SizeRule | None:
        for at, (one, other) in enumerate(self.pairs):
            factor, rest = divmod(first - second, one - other) if one != other else (0, 1)
            if not rest and factor > 0:
                return SizeRule(factor, (at,), first - factor * one)
        return None

    def shape_rules(self, first: Shape, second: Shape) -> tuple[SizeRule, ...] | None:
        """Return the rules of a shape; None where one has none."""
        if len(first) != len(second):
            return None
        rules = [self.rule(one, other) for one, other in zip(first, second, strict=True)]
        found = tuple(rule for rule in rules if rule is not None)
        return found if len(found) == len(rules) else None


def apply_rules(rules: Sequence[SizeRule], values: Sequence[int]) -> Shape:
    """Return the shape for these free sizes."""
    return tuple(rule.at(values) for rule in rules)


def resize_strides(before: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor whose dimensions have the same order in memory; None for others."""
    order = sorted(range(len(before)), key=lambda at: (-strides[at], at))
    if _dense(before, order) != tuple(strides):
        return None
    return _dense(shape, order)


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    found, step = [0] * len(shape), 1
    for at in reversed(order):
        found[at] = step
        step *= max(shape[at], 1)
    return tuple(found)
