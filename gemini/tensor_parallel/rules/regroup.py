"""Interleaved groups: a fused weight is divided so that every part of its result is.

q k v = x.split(64, -1), 192 entries, `Shard(-1, 32, outer=3)`  →  q, k, v: `Shard(-1, 32)`
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.batch_analysis.batch_kinds import Kind, Partial, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, axis
from gemini.batch_analysis.rules.matmul import contract
from gemini.batch_analysis.rules.reshape import reshape_shard
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule
from gemini.tensor_parallel.shard_query import ShardQuery


@shard_rule("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk", "tensor_split")
def parts(call: ShardQuery) -> Kind | Sequence[Kind]:
    """Equal parts along a divided dimension with as many groups."""
    value = call.first
    dim = axis(call.argument(2, "dim", 0), value.rank)
    if not isinstance(value.kind, Shard) or value.kind.dim != dim:
        return batch_rule("split")(call) if not value.is_sum else value.kind
    name = {"chunk": "chunks", "unsafe_chunk": "chunks"}.get(call.name, "split_size")
    name = name if name in call.kwargs else next((key for key in call.kwargs if key != "dim"), name)
    given = call.argument(1, name)
    size = value.shape[dim] // len(call.results)
    if value.kind.outer != len(call.results) or any(result.shape[dim] != size for result in call.results):
        raise AnalysisRefused(f"{call.name} into parts that are not the groups of a divided dimension")
    place = ("k", name) if name in call.kwargs else ("i", 1)
    if isinstance(given, (list, tuple)):
        for at in range(len(given)):
            call.divide(place, ("i", at))
    elif "chunk" not in call.name and call.name != "tensor_split":
        call.divide(place)
    return Shard(dim, value.kind.factor)


@shard_rule("getitem")
def every_nth(call: ShardQuery) -> Kind | Sequence[Kind]:
    """`x[..., ::2]` and `x[..., 1::2]`: shards have whole pairs; other indices by the batch rule."""
    value, items = call.first, list(call.args[1]) if isinstance(call.args[1], tuple) else [call.args[1]]
    if any(item is ... for item in items):
        at = next(at for at, item in enumerate(items) if item is ...)
        items[at : at + 1] = [slice(None)] * (value.rank - len(items) + 1)
    steps = [at for at, item in enumerate(items) if isinstance(item, slice) and item.step not in (None, 1)]
    kind = value.kind
    if not isinstance(kind, Shard) or not all(isinstance(item, slice) for item in items) or steps != [kind.dim]:
        return batch_rule("getitem")(call)
    cut = items.pop(kind.dim)
    is_fair = cut.stop is None and cut.step > 0 and 0 <= (cut.start or 0) < cut.step and kind.factor % cut.step == 0
    if not is_fair or any(item != slice(None) for item in items):
        raise AnalysisRefused("every n-th entry of a divided dimension of which shards have no multiple of n")
    return Shard(kind.dim, kind.factor // cut.step, kind.outer)


@shard_rule("unflatten")
def unflatten(call: ShardQuery) -> Kind:
    """One dimension becomes several, of which one is divided."""
    value = call.first
    if value.is_sum:
        return value.kind
    kind = call.sample(value)
    dim, sizes = axis(call.argument(1, "dim"), value.rank), call.argument(2, "sizes")
    found = reshape_shard(value.shape, kind, call.out().shape, call.samples)
    if kind.dim == dim and sizes[found.dim - dim] != -1:
        place = ("k", "sizes") if "sizes" in call.kwargs else ("i", 2)
        call.divide(place, ("i", found.dim - dim))
    return found


@shard_rule("_grouped_mm", "grouped_mm")
def grouped_mm(call: ShardQuery) -> Kind:
    """Rows (t, k), sorted by expert, times the matrices (e, k, n) of the experts."""
    left, right, offsets = call.first, call.argument(1, "mat2"), call.argument(2, "offs")
    if left.rank != 2 or right.rank != 3 or call.argument(3, "bias") is not None:
        raise AnalysisRefused("a grouped product of other ranks, or with a bias")
    call.constant(offsets)
    if isinstance(right.kind, Shard) and right.kind.dim == 0:
        raise AnalysisRefused("a grouped product of divided experts")
    return contract(call, ["tk", "ekn"], "tn", [left, right])


@shard_rule("repeat_interleave")
def repeat_interleave(call: ShardQuery) -> Kind | Sequence[Kind]:
    """Every entry several times in a row; the size of the result is that of the shard."""
    value = call.first
    if isinstance(value.kind, Partial):
        call.constant((call.args[1:], call.kwargs))
        return value.kind
    found = batch_rule("repeat_interleave")(call)
    if call.kwargs.get("output_size") is not None and axis(call.argument(2, "dim"), value.rank) == found.dim:  # type: ignore[union-attr]
        call.divide(("k", "output_size"))
    return found
