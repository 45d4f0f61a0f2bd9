"""Vocabulary ops: embedding and cross entropy where the shards hold slices of the vocabulary.

Neither gathers logits or tables: the embedding is a sum of which each shard makes a part, and the loss reduces three
numbers per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from gemini.collectives.shard_group import ShardGroup, active_group
from gemini.tensor_parallel.layouts import Shard, shard_blocks


def _own_range(size: int, layout: Shard, group: ShardGroup) -> tuple[int, int]:
    ((start, stop),) = shard_blocks(layout, size, group.size, group.rank)
    return start, stop


def vocabulary_embedding(  # noqa: PLR0917 - the signature of `torch.nn.functional.embedding`
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    entries: int,
    layout: Shard,
) -> torch.Tensor:
    """Return the rows of this shard's slice of a table of `entries` rows, and zeros for ids of other shards: a part."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("a divided embedding has no max_norm, scale_grad_by_freq or sparse gradients")
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < entries):
        raise IndexError("index out of range in self")
    start, stop = _own_range(entries, layout, active_group())
    padding = None
    if padding_idx is not None:
        at = padding_idx % entries - start
        padding = at if 0 <= at < stop - start else None
    local = ids - start
    outside = (local < 0) | (local >= stop - start)
    rows = F.embedding(local.masked_fill(outside, 0), weight, padding)
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)


def vocabulary_cross_entropy(  # noqa: PLR0917 - the signature of `torch.nn.functional.cross_entropy`
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    entries: int,
    layout: Shard,
) -> torch.Tensor:
    """Return the loss of logits of which each shard has some of the `entries` classes; equal on all shards."""
    if target.is_floating_point() or size_average is not None or reduce is not None:
        raise NotImplementedError("a divided cross entropy takes class indices and the argument `reduction`")
    group = active_group()
    dim = 0 if logits.dim() == 1 else 1
    valid = target != ignore_index
    if bool(((target < 0) | (target >= entries)).logical_and(valid).any()):
        raise IndexError("Target is out of bounds.")
    start, stop = _own_range(entries, layout, group)
    wide = torch.promote_types(logits.dtype, torch.float32)
    factors = logits.new_ones(entries, dtype=wide) if weight is None else weight.detach().to(wide)
    masses = factors[target.masked_fill(~valid, 0)] * valid  # the weights of the targets: all shards have all of them
    local = torch.where(valid, target, start) - start
    rows = _Rows.apply(logits, local, masses, dim, group)  # -weight * log p of the target
    loss = rows.masked_fill(~valid, 0.0)
    if label_smoothing > 0.0:
        every = _Every.apply(logits, factors, (start, stop), dim, group).masked_fill(~valid, 0.0)
        loss = loss * (1 - label_smoothing) + every * (label_smoothing / entries)
    loss = loss.to(logits.dtype)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / masses.sum().to(logits.dtype)


def _log_sum(logits: torch.Tensor, dim: int, group: ShardGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits minus their maximum over all classes, exp of these), in at least float32."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    shifted = wide - group.maximum(wide.amax(dim)).unsqueeze(dim)
    return shifted, shifted.exp()


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """`-mass * log_softmax(logits)[t]` for each target `t`."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, logits: torch.Tensor, local: torch.Tensor, mass: torch.Tensor, dim: int, group: ShardGroup
    ) -> Any:
        shifted, exps = _log_sum(logits, dim, group)
        inside = (local >= 0) & (local < logits.shape[dim])
        at = local.masked_fill(~inside, 0).unsqueeze(dim)
        picked = shifted.gather(dim, at).squeeze(dim).masked_fill(~inside, 0.0)
        sums, picked = group.all_reduce(torch.stack([exps.sum(dim), picked]))
        ctx.save_for_backward(exps.div_(sums.unsqueeze(dim)), at, inside, mass)
        ctx.dim, ctx.dtype = dim, logits.dtype
        return (sums.log() - picked) * mass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, at, inside, mass = ctx.saved_tensors
        scale = (grads[0] * mass).unsqueeze(ctx.dim)
        found = probabilities * scale
        found.scatter_add_(ctx.dim, at, -scale * inside.unsqueeze(ctx.dim))
        return found.to(ctx.dtype), None, None, None, None


class _Every(torch.autograd.Function):  # type: ignore[misc]
    """`-sum_c w[c] * log_softmax(logits)[c]`, the part of label smoothing."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, logits: torch.Tensor, weight: torch.Tensor, own: tuple[int, int], dim: int, group: ShardGroup
    ) -> Any:
        shifted, exps = _log_sum(logits, dim, group)
        shape = [1] * logits.dim()
        shape[dim] = -1
        factors = weight[own[0] : own[1]].view(shape).expand_as(shifted)
        sums, weighted = group.all_reduce(torch.stack([exps.sum(dim), (shifted * factors).sum(dim)]))
        mass = weight.sum()
        ctx.save_for_backward(exps.div_(sums.unsqueeze(dim)), factors, mass)
        ctx.dim, ctx.dtype = dim, logits.dtype
        return sums.log() * mass - weighted

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, factors, mass = ctx.saved_tensors
        found = (probabilities * mass - factors) * grads[0].unsqueeze(ctx.dim)
        return found.to(ctx.dtype), None, None, None, None, None
