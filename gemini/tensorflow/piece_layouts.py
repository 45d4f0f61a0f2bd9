"""Piece layouts: how the pieces of a tensor, one per micro-batch or per shard, make up the whole tensor.

    layout                       each piece has                          the whole is
    ──────────────────────────   ─────────────────────────────────────   ─────────────────────────
    Replicate                    the whole                               any of them
    Shard(dim, factor, outer)    a range of the units of a dimension     their concatenation
    Partial                      a term                                  their sum

The dimension of a `Shard` has `outer` groups; each group has all units in order, `factor` entries per unit. A layout is
a statement about values, whatever the meaning of the dimension: an op whose rule cannot keep it takes the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    """Every piece is the whole."""


@dataclass(frozen=True)
class Shard:
    """A piece is a range of the units of dimension `dim`: `outer` groups, `factor` entries per unit."""

    dim: int
    factor: int = 1
    outer: int = 1


@dataclass(frozen=True)
class Partial:
    """The whole is the sum of the pieces."""


Layout = Replicate | Shard | Partial
REPLICATE, PARTIAL = Replicate(), Partial()


def local_shape(layout: Layout, shape: Sequence[int], units: int) -> Shape:
    """Return the shape of a piece with so many units."""
    sizes = list(shape)
    if isinstance(layout, Shard):
        sizes[layout.dim] = layout.outer * units * layout.factor
    return tuple(sizes)


def divide(units: int, count: int) -> tuple[int, ...]:
    """Return the units of each of `count` pieces; the first ones have the remainder."""
    each, more = divmod(units, count)
    return tuple(each + (at < more) for at in range(count))


def reshaped(layout: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """Return the layout after a reshape, or None where the units are no longer ranges of one dimension.

    The entries in row-major order are (leading, unit, trailing); a dimension of the result keeps them if the sizes in
    front of it divide the leading ones.
    """
    leading = layout.outer
    for size in before[: layout.dim]:
        leading *= size
    front, units = 1, before[layout.dim] // (layout.outer * layout.factor)
    for dim, size in enumerate(after):
        if front == 0 or leading % front:
            return None
        outer = leading // front
        if size and size % (outer * units) == 0:
            return Shard(dim, size // (outer * units), outer)
        front *= size
    return None
