"""Mask selection: how many entries a mask selects depends on contents.

    x[mask]                        selected rows of the first sample, then those of the second …
    x.masked_scatter(mask, y)      the entries of y, one after the other, in the selected places
    x[mask] = y                    the same with rows

Samples stay separate where every sample has as many selected entries as in the captured run, as is usual for images in
a text. That is checked before every step; a batch that violates it is not split.
"""

from __future__ import annotations

from math import prod
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule


def in_order(kind: Kind, shape: tuple[int, ...]) -> Shard:
    """Return the shard of a tensor, if in memory order all entries of one sample come before those of the next."""
    if not isinstance(kind, Shard) or kind.outer != 1 or prod(shape[: kind.dim]) != 1:
        raise AnalysisRefused("entries selected by a mask in an order that mixes samples")
    return kind


def select_by_mask(call: OpCall, value: TensorValue, mask: TensorValue) -> Kind:
    """Handle `value[mask]`: the mask covers the first dimensions."""
    kind = in_order(call.sample(value), value.shape)
    if kind.dim >= mask.rank:
        raise AnalysisRefused("a mask that has no samples")
    call.must_be(mask, kind)
    made = call.out()
    if made.batch not in (0, "?") or made.shape[0] % call.samples or not made.shape[0]:
        raise AnalysisRefused("selecting by a mask: how many are selected differs from sample to sample")
    entries = made.shape[0] // call.samples
    call.each(mask, kind, entries)
    return Shard(0, entries)


def assign_by_mask(call: OpCall, value: TensorValue, mask: TensorValue, new: TensorValue, items: list[Any]) -> Kind:
    """Handle `value[mask] = new`: one row per selected entry, in order."""
    if items[0] is not mask or any(item != slice(None) for item in items[1:]):
        raise AnalysisRefused("writing by a mask and other indices")
    kind = in_order(call.sample(value), value.shape)
    call.must_be(mask, kind)
    given = in_order(call.sample(new), new.shape)
    if kind.dim >= mask.rank or given.dim != 0 or new.rank != value.rank - mask.rank + 1:
        raise AnalysisRefused("writing as many entries as a mask selects, with broadcasting")
    call.each(mask, kind, given.factor)
    return kind


@rule("masked_select")
def masked_select(call: OpCall) -> Kind:
    """Of a tensor and a mask of the same shape."""
    value, mask = call.first, call.argument(1, "mask")
    if value.shape != mask.shape:
        raise AnalysisRefused("masked_select with broadcasting")
    return select_by_mask(call, value, mask)


@rule("masked_scatter")
def masked_scatter(call: OpCall) -> Kind:
    """The places that a mask selects are filled from a source, in order."""
    value, mask, source = call.first, call.argument(1, "mask"), call.argument(2, "source")
    made = call.out().shape
    if value.shape != made or mask.rank != len(made):
        raise AnalysisRefused("masked_scatter with broadcasting")
    kind = in_order(broadcast_kinds(call, [value, mask], len(made)), made)
    if value.is_constant or mask.is_constant:
        raise AnalysisRefused("masked_scatter of a constant, or by a mask that is one")
    given = in_order(call.sample(source), source.shape)
    wanted = prod(source.shape) // call.samples
    spread = prod(made) // prod(mask.shape)
    if wanted % spread:
        raise AnalysisRefused("masked_scatter of sources that do not fill whole places")
    if given.entries * call.samples != source.shape[given.dim]:
        raise AnalysisRefused("masked_scatter of sources without samples")
    call.each(mask, kind, wanted // spread, or_none=True)  # where none is selected, nothing is filled in
    return kind
