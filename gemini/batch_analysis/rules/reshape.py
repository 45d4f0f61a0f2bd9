"""Reshape: the batch dimension after a change of shape.

In memory order the samples of a tensor are one axis: `stride` entries from one sample to the next.

    (12, n, 64)  samples 64 apart  →  (12·n, 64)   dimension 0: 12 groups, 1 entry per sample
    (n, 12, 64)  samples 768 apart →  (n·12, 64)   dimension 0: 1 group, 12 entries per sample

So arithmetic alone determines the new kind, even if sizes coincide.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Kind, SampleIndices, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, SampleCount, TensorValue, UnknownNumber, axis
from gemini.batch_analysis.rules.registry import rule


def reshape_shard(shape: tuple[int, ...], kind: Shard, made: tuple[int, ...], samples: int) -> Shard:
    """Return the shard of a tensor of `shape` viewed as shape `made`."""
    if not prod(shape):  # empty: only the sizes matter
        shape, made = tuple(size or 1 for size in shape), tuple(size or 1 for size in made)
    stride = kind.factor * prod(shape[kind.dim + 1 :])
    for dim, size in enumerate(made):
        after = prod(made[dim + 1 :])
        if after <= stride and stride * samples <= after * size and size != 1:
            factor, uneven = divmod(stride, after)
            outer, rest = divmod(size, samples * factor)
            if not uneven and not rest and factor and outer:
                return Shard(dim, factor, outer)
    raise AnalysisRefused("a new shape that mixes samples")


def requested_sizes(call: OpCall) -> list[tuple[tuple[int, ...], Any]]:
    """Return (path in the form of (args, kwargs), number) of the sizes in `x.view(a, b)` or `size=…`."""
    for at, key in enumerate(call.kwargs):
        if key in ("size", "shape", "sizes"):
            return [((1, at, index), size) for index, size in enumerate(call.kwargs[key])]
    if len(call.args) == 2 and isinstance(call.args[1], (tuple, list)):
        return [((0, 1, index), size) for index, size in enumerate(call.args[1])]
    return [((0, at), size) for at, size in enumerate(call.args[1:], 1)]


def resize(call: OpCall, given: list[tuple[tuple[int, ...], Any]], dim: int, entries: int) -> None:
    """Check the requested sizes: that of `dim` must follow the number of samples, all other sizes must not."""
    for at, (path, size) in enumerate(given):
        if isinstance(size, UnknownNumber) or (isinstance(size, SampleCount) and at != dim):
            raise AnalysisRefused(f"{call.name} to a size that depends on the number of samples")
        if at != dim or size == -1:
            continue
        if call.traced and not isinstance(size, SampleCount):
            raise AnalysisRefused(f"{call.name} to a size that does not follow the number of samples")
        if size != entries * call.samples:
            raise AnalysisRefused(f"{call.name} to a size that is not a multiple of the number of samples")
        if not call.traced:
            call.sizes[path] = entries


SQUEEZED = "squeeze() of all dimensions, which a micro-batch of one sample would lose"


@rule("view", "reshape", "_unsafe_view", counts=True)
def view(call: OpCall) -> Kind:
    """Another shape; `view(dtype)` only if it preserves the shape."""
    value = call.first
    call.only(value)
    made = call.out().shape
    retyped = any(isinstance(part, torch.dtype) for part in (*call.args[1:], *call.kwargs.values()))
    given = [] if retyped else requested_sizes(call)
    if value.is_sum or isinstance(value.kind, SampleIndices):
        call.constant([size for _, size in given])
        return _positions(call, value, made)
    kind = call.sample(value)
    if not given and value.shape != made:
        raise AnalysisRefused("a view as another type")
    found = reshape_shard(value.shape, kind, made, call.samples)
    resize(call, given, found.dim, found.entries)
    return found


def _positions(call: OpCall, value: TensorValue, made: tuple[int, ...]) -> Kind:
    if value.is_sum:
        return value.kind
    found = reshape_shard(value.shape, Shard(value.kind.dim), made, call.samples)  # type: ignore[union-attr]
    if found.entries != 1:
        raise AnalysisRefused(f"{call.name} of numbers of samples")
    return SampleIndices(found.dim)


@rule("view_as", "reshape_as", "expand_as_")
def view_as(call: OpCall) -> Kind:
    """Take the shape of another tensor; both must be sharded equally."""
    value, other = call.first, call.argument(1, "other")
    found = reshape_shard(value.shape, call.sample(value), call.out().shape, call.samples)
    call.must_be(other, found)
    return found


@rule("flatten")
def flatten(call: OpCall) -> Kind:
    """Dimensions become one."""
    value = call.first
    if value.is_sum:
        return value.kind
    return reshape_shard(value.shape, call.sample(value), call.out().shape, call.samples)


@rule("unflatten", counts=True)
def unflatten(call: OpCall) -> Kind:
    """One dimension becomes several."""
    value = call.first
    kind = call.sample(value)
    dim, sizes = axis(call.argument(1, "dim"), value.rank), call.argument(2, "sizes")
    made = call.out().shape
    found = reshape_shard(value.shape, kind, made, call.samples)
    if not call.traced and kind.dim == dim and sizes[found.dim - dim] != -1:
        raise AnalysisRefused("unflatten to a plain number of samples")
    resize(call, [((), size) for size in sizes], found.dim - dim, found.entries) if kind.dim == dim else None
    return found


@rule("squeeze")
def squeeze(call: OpCall) -> Kind:
    """Dimensions of one entry are removed; that of the samples must not be among them."""
    value = call.first
    if value.is_sum:
        return value.kind
    kind, dims = call.sample(value), call.argument(1, "dim")
    asked = dims if isinstance(dims, (tuple, list)) else (dims,)
    if dims is not None:
        places = [axis(dim, value.rank) for dim in asked]
        if kind.dim in places:
            raise AnalysisRefused("squeeze of the samples")
        gone = [dim for dim in places if value.shape[dim] == 1]
    elif call.traced and kind.entries * call.least > 1:
        gone = [dim for dim in range(value.rank) if value.shape[dim] == 1]
    else:
        raise AnalysisRefused(f"{SQUEEZED}; give a dimension")
    return Shard(kind.dim - sum(1 for dim in gone if dim < kind.dim), kind.factor, kind.outer)


@rule("unsqueeze")
def unsqueeze(call: OpCall) -> Kind:
    """A new dimension of one entry."""
    value = call.first
    if value.is_sum:
        return value.kind
    at = axis(call.argument(1, "dim"), value.rank + 1)
    if isinstance(value.kind, SampleIndices):
        return SampleIndices(value.kind.dim + (at <= value.kind.dim))
    kind = call.sample(value)
    return Shard(kind.dim + (at <= kind.dim), kind.factor, kind.outer)


@rule("expand", "broadcast_to", counts=True)
def expand(call: OpCall) -> Kind:
    """Repeat entries along dimensions of one entry, also of a constant along a new batch dimension."""
    value, given = call.first, requested_sizes(call)
    made = call.out().shape
    if value.is_sum:
        call.constant([size for _, size in given])
        return value.kind
    if value.is_constant:
        return _spread(call, value, given)
    kind = call.sample(value)
    found = Shard(kind.dim + len(made) - value.rank, kind.factor, kind.outer)
    resize(call, given, found.dim, found.entries)
    return found


def _spread(call: OpCall, value: TensorValue, given: list[tuple[tuple[int, ...], Any]]) -> Kind:
    counted = [at for at, (_, size) in enumerate(given) if isinstance(size, SampleCount)]
    if len(counted) != 1 or any(isinstance(size, UnknownNumber) for _, size in given):
        raise AnalysisRefused(f"{call.name} to a size that depends on the number of samples")
    dim = counted[0]
    own = dim - (len(given) - value.rank)
    if own >= 0 and value.shape[own] != 1:
        raise AnalysisRefused(f"{call.name} of a constant to another number of samples")
    return Shard(dim, given[dim][1] // call.samples)


@rule("expand_as")
def expand_as(call: OpCall) -> Kind:
    """To the shape of another tensor, whose samples must lie where those of the first go."""
    value, other = call.first, call.argument(1, "other")
    if value.is_constant:
        kind = call.sample(other)
        own = kind.dim - (other.rank - value.rank)
        if own >= 0 and value.shape[own] != 1:
            call.must_be(value, Shard(own, kind.factor, kind.outer))
        return kind
    kind = call.sample(value)
    found = Shard(kind.dim + other.rank - value.rank, kind.factor, kind.outer)
    call.must_be(other, found)
    return found
