"""Moves: conversions of a value between layouts, with their gradients.

    y = move(y, Partial(), Replicate())       all-reduce forward, nothing backward
    x = move(x, Replicate(), PartialGrad())   nothing forward, all-reduce backward

Forward moves the value; backward moves the gradient the opposite way: from the layout of the gradient in `want` to
that in `have`. This one rule covers every conjugate pair of tensor and sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch

from gemini.collectives.shard_group import ShardGroup, active_group
from gemini.tensor_parallel.layouts import (
    Layout,
    Partial,
    Replicate,
    Shard,
    gradient_part,
    take_shard,
    unit_range,
    value_part,
)

Plain = Replicate | Shard | Partial


def move(x: torch.Tensor, have: Layout, want: Layout, units: int = 0) -> torch.Tensor:
    """Return a value in another layout; `units` of the divided dimension, where shards have different numbers."""
    group = active_group()
    if x.requires_grad and torch.is_grad_enabled():
        moved: torch.Tensor = _Move.apply(x, have, want, units, group)
        return moved
    return convert(x, value_part(have), value_part(want), group, units)


def shard_size(whole: int, units: int) -> int:
    """Return the share of this shard of a number that counts `units` units of a divided dimension."""
    group = active_group()
    start, stop = unit_range(units, group.size, group.rank)
    return whole // units * (stop - start)


class _Move(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: torch.Tensor, have: Layout, want: Layout, units: int, group: ShardGroup
    ) -> torch.Tensor:
        ctx.layouts, ctx.units, ctx.group = (have, want), units, group
        moved = convert(x, value_part(have), value_part(want), group, units)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        have, want = ctx.layouts
        return convert(grads[0], gradient_part(want), gradient_part(have), ctx.group, ctx.units), *[None] * 4


def convert(x: torch.Tensor, have: Plain, want: Plain, group: ShardGroup, units: int = 0) -> torch.Tensor:
    """Convert a tensor without gradient."""
    if have == want:
        return x
    if isinstance(have, Partial):
        return group.reduce_scatter(x, want) if isinstance(want, Shard) else group.all_reduce(x)
    if isinstance(have, Shard):
        if isinstance(want, Partial):
            return _pad(x, have, group, units)
        return group.all_to_all(x, have, want, units) if isinstance(want, Shard) else group.all_gather(x, have, units)
    if isinstance(want, Shard):
        return take_shard(x, want, group.size, group.rank).contiguous()
    return x if group.rank == 0 else torch.zeros_like(x)


def _pad(x: torch.Tensor, have: Shard, group: ShardGroup, units: int) -> torch.Tensor:
    """Return the whole with zeros in place of the slices of other shards."""
    units = units or x.shape[have.dim] // have.entries * group.size
    whole = x.new_zeros((*x.shape[: have.dim], have.outer, units * have.factor, *x.shape[have.dim + 1 :]))
    start, stop = unit_range(units, group.size, group.rank)
    mine = x.unflatten(have.dim, (have.outer, (stop - start) * have.factor))
    whole.narrow(have.dim + 1, start * have.factor, (stop - start) * have.factor).copy_(mine)
    return whole.flatten(have.dim, have.dim + 1)
