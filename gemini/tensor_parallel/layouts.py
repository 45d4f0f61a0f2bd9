"""Layouts: how the shards of a stage hold a value in forward, and its gradient in backward.

| layout        | value on each shard          | gradient on each shard       | collectives of a value                 |
|---------------|------------------------------|------------------------------|----------------------------------------|
| `Replicate`   | the whole value              | the whole gradient           |                                        |
| `PartialGrad` | the whole value              | a part; the sum is the whole | from `Replicate`: all-reduce backward  |
| `Shard`       | a slice                      | the same slice               | to `PartialGrad`: gather, scatter a sum|
| `Partial`     | a part; the sum is the whole | the whole gradient           | to `Replicate`: all-reduce forward     |

`Replicate`, `Shard` and `Partial` are the batch kinds with shards in place of samples. The dimension of
`Shard(dim, factor, outer)` has `outer` groups, each of *units* of `factor` entries; a shard holds a range of the units
of every group. Where units and shards do not divide, the first shards hold one unit more:

    Shard(0, factor=2, outer=3), 12 entries, 2 shards:   | 0 1 . . | 4 5 . . | 8 9 . . |   shard 0 of a fused q, k, v
                                                         | . . 2 3 | . . 6 7 | . . A B |   shard 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Partial, Replicate, Shard
from gemini.errors import ArtifactError

__all__ = ["Layout", "Partial", "PartialGrad", "Replicate", "Shard"]


@dataclass(frozen=True)
class PartialGrad:
    """The whole value on every shard; the gradients of the shards sum to its gradient."""


Layout = Replicate | PartialGrad | Shard | Partial

REPLICATE, PARTIAL_GRAD, PARTIAL = Replicate(), PartialGrad(), Partial()

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
REDUCE_SCATTER, ALL_TO_ALL = "reduce-scatter", "all-to-all"


def value_part(layout: Layout) -> Replicate | Shard | Partial:
    """Return the layout of the value alone."""
    return REPLICATE if isinstance(layout, PartialGrad) else layout


def gradient_part(layout: Layout) -> Replicate | Shard | Partial:
    """Return the layout of the gradient of a value of this layout."""
    if isinstance(layout, Shard):
        return layout
    return PARTIAL if isinstance(layout, PartialGrad) else REPLICATE


# ── slices ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def unit_range(units: int, count: int, shard: int) -> tuple[int, int]:
    """Return the first unit of a shard and the one after its last; the first shards have the remainder."""
    each, more = divmod(units, count)
    start = shard * each + min(shard, more)
    return start, start + each + (shard < more)


def unit_count(layout: Shard, size: int) -> int:
    """Return the number of units of a dimension of this size."""
    units, rest = divmod(size, layout.entries)
    if rest:
        raise ValueError(f"a dimension of {size} entries has no whole number of units of {layout}")
    return units


def even_shard(dim: int, size: int, count: int, outer: int = 1) -> Shard:
    """Return the layout with one unit per shard; `size` must be a multiple of `outer * count`."""
    return Shard(dim, size // (outer * count), outer)


def shard_blocks(layout: Shard, size: int, count: int, shard: int) -> list[tuple[int, int]]:
    """Return the ranges of entries of the whole dimension that a shard holds, one per group."""
    units = unit_count(layout, size)
    start, stop = (at * layout.factor for at in unit_range(units, count, shard))
    return [(group * units * layout.factor + start, group * units * layout.factor + stop)
            for group in range(layout.outer)]  # fmt: skip


def local_size(layout: Layout, shape: Sequence[int], count: int, shard: int) -> tuple[int, ...]:
    """Return the shape of the part of a shard."""
    sizes = list(shape)
    if isinstance(layout, Shard):
        start, stop = unit_range(unit_count(layout, sizes[layout.dim]), count, shard)
        sizes[layout.dim] = (stop - start) * layout.entries
    return tuple(sizes)


def take_shard(whole: torch.Tensor, layout: Shard, count: int, shard: int) -> torch.Tensor:
    """Return the slice of a shard: a view where the dimension has one group."""
    blocks = shard_blocks(layout, whole.shape[layout.dim], count, shard)
    parts = [whole.narrow(layout.dim, start, stop - start) for start, stop in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, layout.dim)


def join_shards(parts: Sequence[torch.Tensor], layout: Shard) -> torch.Tensor:
    """Return the whole of the slices of all shards."""
    if layout.outer == 1:
        return torch.cat(list(parts), layout.dim)
    groups = [part.chunk(layout.outer, layout.dim) for part in parts]
    return torch.cat([group[at] for at in range(layout.outer) for group in groups], layout.dim)


# ── moves ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def collective(have: Replicate | Shard | Partial, want: Replicate | Shard | Partial) -> str:
    """Return the collective that converts a tensor without gradient; "" where every shard converts on its own.

    `Replicate` → `Partial` keeps the whole on shard 0 and zeros elsewhere; `Shard` → `Partial` pads with zeros.
    """
    if have == want or isinstance(have, Replicate):
        return ""
    if isinstance(have, Partial):
        return REDUCE_SCATTER if isinstance(want, Shard) else ALL_REDUCE
    if isinstance(want, Partial):
        return ""
    return ALL_TO_ALL if isinstance(want, Shard) else ALL_GATHER


def move_collectives(have: Layout, want: Layout, grad: bool = True) -> tuple[str, str]:
    """Return the collectives of `move(x, have, want)`, forward and backward.

    Forward moves the value; backward moves the gradient the opposite way, from the gradient's layout in `want` to that
    in `have`.
    """
    forward = collective(value_part(have), value_part(want))
    return forward, collective(gradient_part(want), gradient_part(have)) if grad and have != want else ""


def wire_bytes(name: str, size: float, count: int) -> float:
    """Return the bytes that each shard sends in a collective over a value of `size` bytes (ring algorithms)."""
    share = (count - 1) / count
    return {ALL_REDUCE: 2 * share, ALL_GATHER: share, REDUCE_SCATTER: share, ALL_TO_ALL: share / count, "": 0.0}[
        name
    ] * size


def conversions(have: Layout, wanted: Iterable[Layout], grad: bool) -> list[tuple[Layout, Layout]]:
    """Return the moves that make all wanted versions of a value, each from the produced or an earlier version.

    A replicated version is made from one with partial gradients, where that is wanted too: the gradient is then summed
    once for both.
    """
    found: list[tuple[Layout, Layout]] = []
    versions = sorted(set(wanted) - {have}, key=lambda layout: isinstance(layout, Replicate))
    for want in versions:
        shared = grad and isinstance(want, Replicate) and PartialGrad() in (have, *versions)
        found.append((PartialGrad() if shared else have, want))
    return found


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def layout_text(layout: Layout) -> str:
    """Return a short text: `R`, `R+` (partial gradients), `P`, `S1`, `S0/3` (three groups)."""
    if isinstance(layout, Shard):
        return f"S{layout.dim}" + (f"/{layout.outer}" if layout.outer > 1 else "")
    return {Replicate: "R", PartialGrad: "R+", Partial: "P"}[type(layout)]


_NAMES = {Replicate: "replicate", PartialGrad: "partial gradient", Partial: "partial"}
_VALUES: dict[str, Layout] = {"replicate": REPLICATE, "partial gradient": PARTIAL_GRAD, "partial": PARTIAL}


def write_layout(layout: Layout) -> Any:
    """Return a layout as JSON: a name, or `["shard", dim, factor, outer]`."""
    if isinstance(layout, Shard):
        return ["shard", layout.dim, layout.factor, layout.outer]
    return _NAMES[type(layout)]


def read_layout(data: Any) -> Layout:
    """Read what `write_layout` returned."""
    if isinstance(data, str) and data in _VALUES:
        return _VALUES[data]
    if isinstance(data, list) and len(data) == 4 and data[0] == "shard" and all(type(n) is int for n in data[1:]):
        return Shard(*data[1:])
    raise ArtifactError(
        f"not a layout: {data!r:.80}\n    → one of {', '.join(_VALUES)}, or [shard, dim, factor, outer]"
    )
