"""Indexing: `x[…]`, gather, scatter, lookups. Along other dimensions than that of the samples, or of one sample by its
own indices:

    logits[arange(n), last]      n samples, of each the entry it asks for
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gemini.batch_analysis.batch_invariance import Even, agreed, takes_even
from gemini.batch_analysis.batch_kinds import Kind, Pointers, Positions, Replicate, Shard
from gemini.batch_analysis.op_call import Call, Count, Demand, Odd, Refused, Rows, Value, axis, leaves
from gemini.batch_analysis.rules.mask_selection import filled, selected
from gemini.batch_analysis.rules.pointwise import aligned
from gemini.batch_analysis.rules.registry import rule
from gemini.batch_analysis.rules.shape_ops import moved
from gemini.batch_analysis.split_result import NUMBERS


def _items(index: Any, rank: int) -> list[Any]:
    """The index with its ellipsis written out: an item a dimension, None for new ones."""
    items = [_listed(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = sum(_consumed(item) for item in items if item is not None and item is not Ellipsis)
    at = next((at for at, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * (rank - used), *items[at + 1 :]]


def _listed(item: Any) -> Any:
    """A list of numbers is a constant tensor."""
    if not isinstance(item, list):
        return item
    if not all(type(part) is int for part in item):
        raise Refused("indexing by a list")
    return Value("list", Replicate(), (len(item),), torch.int64)


def _consumed(item: Any) -> int:
    return item.rank if isinstance(item, Value) and item.dtype == torch.bool else 1


@rule("getitem", counts=True)
def getitem(call: Call) -> Kind:
    """`x[index]`."""
    value, items = call.args[0], _items(call.args[1], call.args[0].rank)
    tensors = [item for item in items if isinstance(item, Value)]
    if any(item.dtype in (torch.bool, torch.uint8) for item in tensors):
        if items[0] is not tensors[0] or any(item != slice(None) for item in items[1:]) or value.is_constant:
            raise Refused("selecting by a mask: how many are selected depends on contents")
        return selected(call, value, tensors[0])
    if value.is_sum:
        call.constant(items)
        return value.kind  # type: ignore[no-any-return]
    if tensors:
        return _advanced(call, value, items)
    if isinstance(value.kind, Positions):
        return _positions(call, value, items)
    return _basic(call, call.sample(value), value, items)


def _positions(call: Call, value: Value, items: list[Any]) -> Kind:
    made = _basic(call, Shard(value.kind.dim), value, items)  # type: ignore[union-attr]
    return Positions(made.dim)


def _basic(call: Call, kind: Shard, value: Value, items: list[Any]) -> Shard:
    source = target = 0
    found: int | None = None
    for item in items:
        if item is None:
            target += 1
            continue
        if source == kind.dim:
            kind = _some_alike(call, kind, value, items, item) or kind
            if kind.entries * call.samples == value.shape[source]:
                _whole(call, item, value.shape[source])
            found = target
        elif any(isinstance(leaf, (Count, Odd)) for leaf in leaves(item)):
            raise Refused("an index that depends on the number of samples")
        target += isinstance(item, slice)
        source += 1
    if found is None:
        raise Refused("an index that leaves out the samples")
    return moved(kind, found)


def _some_alike(call: Call, kind: Shard, value: Value, items: list[Any], item: Any) -> Shard | None:
    """`x[:n]` of more entries than samples, all of them alike: one a sample."""
    even = value.even if call.name == "getitem" else None
    if not isinstance(even, Even) or even.shuffled or even.period != 1 or not takes_even(even, items, value.rank):
        return None
    if not isinstance(item, slice) or item.start not in (None, 0) or item.step not in (None, 1):
        return None
    return Shard(kind.dim, item.stop // call.samples) if isinstance(item.stop, Count) else None


def _whole(call: Call, item: Any, size: int) -> None:
    """Refuse an index of the dimension of the samples that does not take all of them."""
    if not isinstance(item, slice):
        raise Refused("picking a sample out of the batch")
    ends_free = item.stop is None or (call.traced and isinstance(item.stop, Count) and item.stop == size)
    if item.start not in (None, 0) or isinstance(item.start, Count) or not ends_free or item.step not in (None, 1):
        raise Refused("taking some samples out of the batch")


def _advanced(call: Call, value: Value, items: list[Any]) -> Kind:
    """Integer tensors among the items: their broadcast takes the place of the dimensions they index."""
    if any(isinstance(leaf, (Count, Odd)) for leaf in leaves(items)):
        raise Refused("an index that depends on the number of samples")
    tensors = [item for item in items if isinstance(item, Value)]
    rank = max(item.rank for item in tensors)
    places = [at for at, item in enumerate(items) if isinstance(item, (Value, int)) and not isinstance(item, bool)]
    front = places != list(range(places[0], places[-1] + 1))
    start = 0 if front else sum(1 for item in items[: places[0]] if item is None or isinstance(item, slice))
    numbered = [item for item in tensors if isinstance(item.kind, Positions)]
    others = [item for item in tensors if item not in numbered]
    if value.is_constant:
        if numbered:
            raise Refused("indexing a constant by numbers of samples")
        kind = aligned(call, tensors, rank)
        return moved(kind, start + kind.dim) if isinstance(kind, Shard) else kind
    own = call.sample(value)
    at = _item_of(items, own.dim)
    if isinstance(items[at], slice):  # samples are not indexed: all indices must be the same for all
        if any(not item.is_constant for item in tensors):
            raise Refused("indexing samples by indices that differ from sample to sample")
        _whole(call, items[at], value.shape[own.dim])
        kept = sum(1 for item in items[:at] if item is None or isinstance(item, slice))
        return moved(own, kept + (rank if front or at > places[-1] else 0))
    if isinstance(items[at], Value) and items[at].numbers and not call.traced:
        _number(call, items[at])
        others = [item for item in tensors if item is not items[at]]
        return _own_entries(call, own, replace(items[at], kind=Positions(0)), others, rank, start)
    return _own_entries(call, own, items[at], others, rank, start)


def _number(call: Call, item: Value) -> None:
    """An operand of the tape that numbers the samples: a micro-batch has numbers of its own."""
    index = call.args[1]
    path = (0, 1) if not isinstance(index, tuple) else (0, 1, next(i for i, one in enumerate(index) if one is item))
    call.sizes[path] = NUMBERS
    call.assumed.add(item.key)


def _own_entries(  # noqa: PLR0917
    call: Call, own: Shard, item: Any, others: list[Value], rank: int, start: int
) -> Kind:
    if isinstance(item, Value) and item.rank == rank == 1 and not [one for one in others if one is not item]:
        return _own_rows(own, item, start)
    if not isinstance(item, Value) or not isinstance(item.kind, Positions) or own.entries != 1:
        raise Refused("picking samples out of the batch by index")
    placed = item.kind.dim + rank - item.rank
    for other in others:
        dim = placed - (rank - other.rank)
        if dim >= 0 and other.shape[dim] != 1:
            call.must_be(other, Shard(dim))
        elif not other.is_constant:
            raise Refused("indexing samples by indices of other samples")
    return Shard(start + placed)


def _own_rows(own: Shard, item: Value, start: int) -> Kind:
    """Rows by their numbers: of every sample its own, if the numbers are known before the step."""
    if isinstance(item.kind, Pointers) and item.kind.rows == own.entries and own.outer == 1:
        return moved(item.kind.kind, start)
    if isinstance(item.kind, Positions) and own.entries == 1:
        return Shard(start)
    if item.known and isinstance(item.kind, Shard) and own.outer == 1:
        raise Demand(item.key, Rows(own.entries))
    raise Refused("picking samples out of the batch by index")


def _item_of(items: list[Any], dim: int) -> int:
    source = 0
    for at, item in enumerate(items):
        if item is None:
            continue
        if source == dim:
            return at
        source += 1
    raise Refused("an index that leaves out the samples")


@rule("setitem", counts=True)
def setitem(call: Call) -> Kind:
    """`x[index] = value`: the value must have its samples where `x[index]` has them."""
    value, index, new = call.args
    rank = value.rank
    items = _items(index, rank)
    masks = [item for item in items if isinstance(item, Value) and item.dtype == torch.bool]
    kind = call.sample(value)
    if masks:
        if len(items) != 1 and any(not isinstance(item, slice) for item in items if item is not masks[0]):
            raise Refused("writing by a mask and other indices")
        if isinstance(new, Value) and not new.is_constant:
            return filled(call, value, masks[0], new, items)
        kept = rank - masks[0].rank - (items.index(masks[0]) if items[0] is not masks[0] else 0)
        if isinstance(new, Value) and new.rank > kept and new.shape not in ((), (1,)):  # a row is the same for all
            raise Refused("writing as many entries as a mask selects")
        at = items.index(masks[0])
        found = aligned(call, [masks[0]], masks[0].rank)
        if isinstance(found, Shard) and found.dim + at != kind.dim:
            raise Refused("a mask whose samples lie elsewhere")
        if not isinstance(found, Shard) and at <= kind.dim < at + masks[0].rank:
            raise Refused("a mask that has no samples")
        call.constant(new)
        return kind
    if any(isinstance(item, Value) for item in items):
        placed = _advanced(call, value, items)
    else:
        placed = _basic(call, kind, value, items)
    if isinstance(new, (Count, Odd)):
        raise Refused("writing the number of samples")
    if isinstance(new, Value) and not isinstance(placed, Shard):
        raise Refused("writing samples to a constant")
    if isinstance(new, Value) and isinstance(placed, Shard):
        made = _rank(items)
        dim = placed.dim - (made - new.rank)
        if dim >= 0 and new.shape[dim] != 1:
            call.must_be(new, Shard(dim, placed.factor, placed.outer))
        elif not new.is_constant:
            raise Refused("writing samples to places of other samples")
    return kind


def _rank(items: list[Any]) -> int:
    tensors = [item.rank for item in items if isinstance(item, Value)]
    return sum(1 for item in items if item is None or isinstance(item, slice)) + max(tensors, default=0)


@rule("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce")
def gather(call: Call) -> Kind:
    """Along a dimension, by indices of the same rank."""
    value, dim, index = call.first, call.given(1, "dim"), call.given(2, "index")
    if call.name == "take_along_dim":
        index, dim = call.given(1, "indices"), call.given(2, "dim")
    sources = [part for part in (call.given(3, "src"), call.kwargs.get("value")) if isinstance(part, Value)]
    group = agreed([value, index, *sources])
    if value.rank == 1 and isinstance(value.kind, Shard) and isinstance(index.kind, (Shard, Pointers)):
        return _by_own_rows(call, value, index, sources)
    is_by_samples = call.name == "gather" and dim is not None and isinstance(index.kind, Shard)
    if is_by_samples and value.is_constant and axis(dim, value.rank) == call.sample(index).dim:
        return call.sample(index)  # of a table, by the numbers of every sample
    kinds = {one.kind for one in group if not one.is_constant}
    if dim is None or len(kinds) != 1:
        raise Refused(f"{call.name} of samples in different dimensions")
    kind = call.sample(next(one for one in group if not one.is_constant))
    if axis(dim, value.rank) == kind.dim:
        raise Refused(f"{call.name} along the samples")
    for one in group:
        broadcast = call.name == "take_along_dim" and one.shape[kind.dim] == 1
        if one.is_constant and not broadcast:
            call.must_be(one, kind)
    return kind


def _by_own_rows(call: Call, value: Value, index: Value, sources: list[Value]) -> Kind:
    """One dimension, that of the samples: of every sample its own entries, if the numbers are known before the step."""
    own = call.sample(value)
    if own.outer == 1 and isinstance(index.kind, Shard) and index.known:
        raise Demand(index.key, Rows(own.entries))
    if not isinstance(index.kind, Pointers) or index.kind.rows != own.entries:
        raise Refused(f"{call.name} along the samples")
    if call.name in ("gather", "take_along_dim"):
        return index.kind.kind
    for source in sources:
        if source.rank or not source.is_constant:
            call.must_be(source, index.kind.kind)
    return own


@rule("index_select", "index_add", "index_copy", "index_fill")
def index_select(call: Call) -> Kind:
    """Along a dimension, by one list of indices; of a constant, by the indices of every sample."""
    value, dim, index = call.first, call.given(1, "dim"), call.given(2, "index")
    dim = axis(dim, value.rank)
    if value.is_constant and call.name == "index_select":
        kind = call.sample(index)
        return moved(kind, dim)
    kind = call.sample(value)
    if not index.is_constant or kind.dim == dim:
        raise Refused(f"{call.name} by indices that depend on the batch, or along the samples")
    source = call.given(3, "source")
    if isinstance(source, Value) and source.rank:
        call.must_be(source, kind)
    return kind


@rule("embedding")
def embedding(call: Call) -> Kind:
    """Rows of a table."""
    index, table = call.given(0, "input"), call.given(1, "weight")
    if call.given(3, "max_norm") is not None:
        raise Refused("an embedding that renormalizes its table as it reads")
    if call.given(5, "scale_grad_by_freq", call.kwargs.get("scale_grad_by_freq", False)) is True:
        raise Refused("an embedding whose gradients depend on how often a row occurs in the batch")
    call.only(index)
    if not table.is_constant:
        raise Refused("a table that depends on the batch")
    return call.sample(index)


@rule("one_hot")
def one_hot(call: Call) -> Kind:
    """A new last dimension; the number of classes must be given."""
    classes = call.given(1, "num_classes", -1)
    if not isinstance(classes, int) or isinstance(classes, Count) or classes < 0:
        raise Refused("one_hot without a number of classes")
    return call.sample(call.first)
