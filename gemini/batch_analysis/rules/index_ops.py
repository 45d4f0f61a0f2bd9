"""Indexing: `x[…]`, gather, scatter, lookups, along dimensions other than that of the samples, or per sample:

logits[arange(n), last]      n samples, one entry of each
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gemini.batch_analysis.batch_invariance import Invariant, align_invariant, indexes_invariant_part
from gemini.batch_analysis.batch_kinds import Kind, Replicate, RowIndices, SampleIndices, Shard
from gemini.batch_analysis.op_call import (
    AnalysisRefused,
    DecisionDemand,
    OpCall,
    RowIndexDecision,
    SampleCount,
    TensorValue,
    UnknownNumber,
    axis,
    leaves,
)
from gemini.batch_analysis.rules.mask_selection import assign_by_mask, select_by_mask
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule
from gemini.batch_analysis.rules.shape_ops import move_shard
from gemini.batch_analysis.split_result import NUMBERS


def _items(index: Any, rank: int) -> list[Any]:
    """Return the index with its ellipsis expanded: one item per dimension, None for new ones."""
    items = [_as_tensor_index(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = sum(_indexed_dims(item) for item in items if item is not None and item is not Ellipsis)
    at = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _as_tensor_index(item: Any) -> Any:
    """Return a list of numbers as a constant tensor."""
    if not isinstance(item, list):
        return item
    if not all(type(part) is int for part in item):
        raise AnalysisRefused("indexing by a list")
    return TensorValue("list", Replicate(), (len(item),), torch.int64)


def _indexed_dims(item: Any) -> int:
    return item.rank if isinstance(item, TensorValue) and item.dtype == torch.bool else 1


@rule("getitem", counts=True)
def getitem(call: OpCall) -> Kind:
    """`x[index]`."""
    value, items = call.args[0], _items(call.args[1], call.args[0].rank)
    tensors = [item for item in items if isinstance(item, TensorValue)]
    if any(item.dtype in (torch.bool, torch.uint8) for item in tensors):
        if items[0] is not tensors[0] or any(item != slice(None) for item in items[1:]) or value.is_constant:
            raise AnalysisRefused("selecting by a mask: how many are selected depends on contents")
        return select_by_mask(call, value, tensors[0])
    if value.is_sum:
        call.constant(items)
        return value.kind  # type: ignore[no-any-return]
    if tensors:
        return _advanced_index(call, value, items)
    if isinstance(value.kind, SampleIndices):
        return _positions(call, value, items)
    return _basic(call, call.sample(value), value, items)


def _positions(call: OpCall, value: TensorValue, items: list[Any]) -> Kind:
    made = _basic(call, Shard(value.kind.dim), value, items)  # type: ignore[union-attr]
    return SampleIndices(made.dim)


def _basic(call: OpCall, kind: Shard, value: TensorValue, items: list[Any]) -> Shard:
    source = target = 0
    found: int | None = None
    for item in items:
        if item is None:
            target += 1
            continue
        if source == kind.dim:
            kind = _invariant_slice(call, kind, value, items, item) or kind
            if kind.entries * call.samples == value.shape[source]:
                _check_takes_all(call, item, value.shape[source])
            found = target
        elif any(isinstance(leaf, (SampleCount, UnknownNumber)) for leaf in leaves(item)):
            raise AnalysisRefused("an index that depends on the number of samples")
        target += isinstance(item, slice)
        source += 1
    if found is None:
        raise AnalysisRefused("an index that leaves out the samples")
    return move_shard(kind, found)


def _invariant_slice(call: OpCall, kind: Shard, value: TensorValue, items: list[Any], item: Any) -> Shard | None:
    """Handle `x[:n]` of more entries than samples, all of them equal: one per sample."""
    even = value.invariance if call.name == "getitem" else None
    if (
        not isinstance(even, Invariant)
        or even.shuffled
        or even.period != 1
        or not indexes_invariant_part(even, items, value.rank)
    ):
        return None
    if not isinstance(item, slice) or item.start not in (None, 0) or item.step not in (None, 1):
        return None
    return Shard(kind.dim, item.stop // call.samples) if isinstance(item.stop, SampleCount) else None


def _check_takes_all(call: OpCall, item: Any, size: int) -> None:
    """Refuse an index of the batch dimension that does not take all samples."""
    if not isinstance(item, slice):
        raise AnalysisRefused("picking a sample out of the batch")
    ends_free = item.stop is None or (call.traced and isinstance(item.stop, SampleCount) and item.stop == size)
    if (
        item.start not in (None, 0)
        or isinstance(item.start, SampleCount)
        or not ends_free
        or item.step not in (None, 1)
    ):
        raise AnalysisRefused("taking some samples out of the batch")


def _advanced_index(call: OpCall, value: TensorValue, items: list[Any]) -> Kind:
    """Handle integer tensors among the items: their broadcast replaces the dimensions they index."""
    if any(isinstance(leaf, (SampleCount, UnknownNumber)) for leaf in leaves(items)):
        raise AnalysisRefused("an index that depends on the number of samples")
    tensors = [item for item in items if isinstance(item, TensorValue)]
    rank = max(item.rank for item in tensors)
    places = [
        at for at, item in enumerate(items) if isinstance(item, (TensorValue, int)) and not isinstance(item, bool)
    ]
    front = places != list(range(places[0], places[-1] + 1))
    start = 0 if front else sum(1 for item in items[: places[0]] if item is None or isinstance(item, slice))
    numbered = [item for item in tensors if isinstance(item.kind, SampleIndices)]
    others = [item for item in tensors if item not in numbered]
    if value.is_constant:
        if numbered:
            raise AnalysisRefused("indexing a constant by numbers of samples")
        kind = broadcast_kinds(call, tensors, rank)
        return move_shard(kind, start + kind.dim) if isinstance(kind, Shard) else kind
    own = call.sample(value)
    at = _item_of(items, own.dim)
    if isinstance(items[at], slice):  # samples are not indexed: the indices must be replicated
        if any(not item.is_constant for item in tensors):
            raise AnalysisRefused("indexing samples by indices that differ from sample to sample")
        _check_takes_all(call, items[at], value.shape[own.dim])
        kept = sum(1 for item in items[:at] if item is None or isinstance(item, slice))
        return move_shard(own, kept + (rank if front or at > places[-1] else 0))
    if isinstance(items[at], TensorValue) and items[at].numbers and not call.traced:
        _number(call, items[at])
        others = [item for item in tensors if item is not items[at]]
        return _own_entries(call, own, replace(items[at], kind=SampleIndices(0)), others, rank, start)
    return _own_entries(call, own, items[at], others, rank, start)


def _number(call: OpCall, item: TensorValue) -> None:
    """Handle an operand of the tape that holds the sample indices: each micro-batch has its own."""
    index = call.args[1]
    path = (0, 1) if not isinstance(index, tuple) else (0, 1, next(i for i, one in enumerate(index) if one is item))
    call.sizes[path] = NUMBERS
    call.assumed.add(item.key)


def _own_entries(  # noqa: PLR0917
    call: OpCall, own: Shard, item: Any, others: list[TensorValue], rank: int, start: int
) -> Kind:
    if isinstance(item, TensorValue) and item.rank == rank == 1 and not [one for one in others if one is not item]:
        return _own_rows(own, item, start)
    if not isinstance(item, TensorValue) or not isinstance(item.kind, SampleIndices) or own.entries != 1:
        raise AnalysisRefused("picking samples out of the batch by index")
    placed = item.kind.dim + rank - item.rank
    for other in others:
        dim = placed - (rank - other.rank)
        if dim >= 0 and other.shape[dim] != 1:
            call.must_be(other, Shard(dim))
        elif not other.is_constant:
            raise AnalysisRefused("indexing samples by indices of other samples")
    return Shard(start + placed)


def _own_rows(own: Shard, item: TensorValue, start: int) -> Kind:
    """Handle rows by their indices: each sample's own, if the indices are known before the step."""
    if isinstance(item.kind, RowIndices) and item.kind.rows == own.entries and own.outer == 1:
        return move_shard(item.kind.kind, start)
    if isinstance(item.kind, SampleIndices) and own.entries == 1:
        return Shard(start)
    if item.known and isinstance(item.kind, Shard) and own.outer == 1:
        raise DecisionDemand(item.key, RowIndexDecision(own.entries))
    raise AnalysisRefused("picking samples out of the batch by index")


def _item_of(items: list[Any], dim: int) -> int:
    source = 0
    for at, item in enumerate(items):
        if item is None:
            continue
        if source == dim:
            return at
        source += 1
    raise AnalysisRefused("an index that leaves out the samples")


@rule("setitem", counts=True)
def setitem(call: OpCall) -> Kind:
    """`x[index] = value`: the value must have its samples where `x[index]` has them."""
    value, index, new = call.args
    rank = value.rank
    items = _items(index, rank)
    masks = [item for item in items if isinstance(item, TensorValue) and item.dtype == torch.bool]
    kind = call.sample(value)
    if masks:
        if len(items) != 1 and any(not isinstance(item, slice) for item in items if item is not masks[0]):
            raise AnalysisRefused("writing by a mask and other indices")
        if isinstance(new, TensorValue) and not new.is_constant:
            return assign_by_mask(call, value, masks[0], new, items)
        kept = rank - masks[0].rank - (items.index(masks[0]) if items[0] is not masks[0] else 0)
        if (
            isinstance(new, TensorValue) and new.rank > kept and new.shape not in ((), (1,))
        ):  # a single row is broadcast
            raise AnalysisRefused("writing as many entries as a mask selects")
        at = items.index(masks[0])
        found = broadcast_kinds(call, [masks[0]], masks[0].rank)
        if isinstance(found, Shard) and found.dim + at != kind.dim:
            raise AnalysisRefused("a mask whose samples lie elsewhere")
        if not isinstance(found, Shard) and at <= kind.dim < at + masks[0].rank:
            raise AnalysisRefused("a mask that has no samples")
        call.constant(new)
        return kind
    if any(isinstance(item, TensorValue) for item in items):
        placed = _advanced_index(call, value, items)
    else:
        placed = _basic(call, kind, value, items)
    if isinstance(new, (SampleCount, UnknownNumber)):
        raise AnalysisRefused("writing the number of samples")
    if isinstance(new, TensorValue) and not isinstance(placed, Shard):
        raise AnalysisRefused("writing samples to a constant")
    if isinstance(new, TensorValue) and isinstance(placed, Shard):
        made = _rank(items)
        dim = placed.dim - (made - new.rank)
        if dim >= 0 and new.shape[dim] != 1:
            call.must_be(new, Shard(dim, placed.factor, placed.outer))
        elif not new.is_constant:
            raise AnalysisRefused("writing samples to places of other samples")
    return kind


def _rank(items: list[Any]) -> int:
    tensors = [item.rank for item in items if isinstance(item, TensorValue)]
    return sum(1 for item in items if item is None or isinstance(item, slice)) + max(tensors, default=0)


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather(call: OpCall) -> Kind:
    """Along a dimension, by indices of the same rank."""
    value, dim, index = call.first, call.argument(1, "dim"), call.argument(2, "index")
    if call.name == "take_along_dim":
        index, dim = call.argument(1, "indices"), call.argument(2, "dim")
    sources = [part for part in (call.argument(3, "src"), call.kwargs.get("value")) if isinstance(part, TensorValue)]
    group = align_invariant([value, index, *sources])
    if value.rank == 1 and isinstance(value.kind, Shard) and isinstance(index.kind, (Shard, RowIndices)):
        return _by_own_rows(call, value, index, sources)
    is_by_samples = call.name == "gather" and dim is not None and isinstance(index.kind, Shard)
    if is_by_samples and value.is_constant and axis(dim, value.rank) == call.sample(index).dim:
        return call.sample(index)  # of a table, by the indices of every sample
    kinds = {one.kind for one in group if not one.is_constant}
    if dim is None or len(kinds) != 1:
        raise AnalysisRefused(f"{call.name} of samples in different dimensions")
    kind = call.sample(next(one for one in group if not one.is_constant))
    if axis(dim, value.rank) == kind.dim:
        raise AnalysisRefused(f"{call.name} along the samples")
    for one in group:
        broadcast = call.name == "take_along_dim" and one.shape[kind.dim] == 1
        if one.is_constant and not broadcast:
            call.must_be(one, kind)
    return kind


def _by_own_rows(call: OpCall, value: TensorValue, index: TensorValue, sources: list[TensorValue]) -> Kind:
    """Handle indices along the batch dimension: each sample's own, if they are known before the step."""
    own = call.sample(value)
    if own.outer == 1 and isinstance(index.kind, Shard) and index.known:
        raise DecisionDemand(index.key, RowIndexDecision(own.entries))
    if not isinstance(index.kind, RowIndices) or index.kind.rows != own.entries:
        raise AnalysisRefused(f"{call.name} along the samples")
    if call.name in ("gather", "take_along_dim"):
        return index.kind.kind
    for source in sources:
        if source.rank or not source.is_constant:
            call.must_be(source, index.kind.kind)
    return own


@rule("index_select", "index_add", "index_copy", "index_fill")
def index_select(call: OpCall) -> Kind:
    """Along a dimension, by one list of indices; of a constant, by the indices of every sample."""
    value, dim, index = call.first, call.argument(1, "dim"), call.argument(2, "index")
    dim = axis(dim, value.rank)
    if value.is_constant and call.name == "index_select":
        kind = call.sample(index)
        return move_shard(kind, dim)
    kind = call.sample(value)
    if not index.is_constant or kind.dim == dim:
        raise AnalysisRefused(f"{call.name} by indices that depend on the batch, or along the samples")
    source = call.argument(3, "source")
    if isinstance(source, TensorValue) and source.rank:
        call.must_be(source, kind)
    return kind


@rule("embedding")
def embedding(call: OpCall) -> Kind:
    """Rows of a table."""
    index, table = call.argument(0, "input"), call.argument(1, "weight")
    if call.argument(3, "max_norm") is not None:
        raise AnalysisRefused("an embedding that renormalizes its table as it reads")
    if call.argument(5, "scale_grad_by_freq", call.kwargs.get("scale_grad_by_freq", False)) is True:
        raise AnalysisRefused("an embedding whose gradients depend on how often a row occurs in the batch")
    call.only(index)
    if not table.is_constant:
        raise AnalysisRefused("a table that depends on the batch")
    return call.sample(index)


@rule("one_hot")
def one_hot(call: OpCall) -> Kind:
    """Add a last dimension; the number of classes must be passed."""
    classes = call.argument(1, "num_classes", -1)
    if not isinstance(classes, int) or isinstance(classes, SampleCount) or classes < 0:
        raise AnalysisRefused("one_hot without a number of classes")
    return call.sample(call.first)
