"""Unit counts: the numbers of units that dimensions are divided into, and of the groups that they interleave."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gemini.tensor_parallel.node_ports import NodeCall

_MOST_PARTS = 4  # of a dimension that is taken apart entry by entry
_MATTERS, _MOST_UNITS = 0.03, 3  # share of the parameters that numbers of units are tried for, and how many of them


def uneven_units(tensors: Sequence[nn.Parameter], calls: Sequence[NodeCall], size: int) -> tuple[int, ...]:
    """Return numbers of units that shards do not divide: of heads, or rows of a vocabulary, if much depends on them."""
    odd = {dim for one in tensors for dim in one.shape}
    odd |= {dim for call in calls for port in call.results for at, dim in enumerate(port.shape)
            if port.grad and len(port.shape) > 3 and port.is_divisible(at)}  # fmt: skip
    whole = sum(one.nbytes for one in tensors)
    found: dict[int, int] = {}
    for dim in odd:
        if dim > size and dim % size:
            weights = (one.nbytes for one in tensors if any(own % dim == 0 for own in one.shape if own >= dim))
            found[dim] = sum(weights)
    best = sorted((dim for dim, own in found.items() if own >= _MATTERS * whole), key=lambda dim: (-found[dim], dim))
    return tuple(best[:_MOST_UNITS])


def interleaved_groups(calls: Sequence[NodeCall]) -> tuple[int, ...]:
    """Return the numbers of interleaved groups that values may have: the parts that ops cut or join."""
    found = {1}
    for call in calls:
        if call.name == "recurrent_layer" and call.args[8]:
            found.add(2)  # directions
        if call.name == "multi_head_attention_forward":
            found.add(3)  # queries, keys and values
        if not call.refusal and any(port.grad for port in call.results):
            found.add(_parts(call))
    return tuple(sorted(found))


def _parts(call: NodeCall) -> int:
    """Return the number of parts of which an op makes some, 1 for one that takes none."""
    if call.name in ("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk"):
        return len(call.results)
    count = 1
    if call.name == "unbind":  # q, k, v = x.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
        count = len(call.results)
    elif call.name in ("getitem", "select") and len(call.results[0].shape) == len(call.inputs[0].shape) - 1:
        places = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        dim = next((at for at, place in enumerate(places) if type(place) is int), 0)
        count = call.inputs[0].shape[call.args[1] if call.name == "select" else dim]
    return count if count <= _MOST_PARTS else 1
