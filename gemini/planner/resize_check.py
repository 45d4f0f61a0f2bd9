"""Resize check: do the sizes of a resized plan hold beyond the two calls that they were learned from?

Two calls do not tell `t // 3` from a constant, if they have 12 and 14 entries. So before a pair of plans is used, the
model is traced again: as the present call, and at two lengths made from its inputs, which are repeated or cut. Every
value must have the predicted shape, and every random op too. Lengths that the model rejects, or at which it takes
another branch, tell nothing: guards refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.hidden_size_reads import find_hidden_size_read, guard_facts, trace_again
from gemini.capture.trace_state import TraceRefused
from gemini.ir.call_binding import ModelCall
from gemini.planner.microbatch_split import find_part_like_batch, slice_call
from gemini.planner.rng_analysis import StagePatterns, record_stage_rng
from gemini.planner.shard_sizes import slice_patterns
from gemini.planner.shard_stages import record_divided_rng
from gemini.planner.sized_graph import at_samples
from gemini.planner.step_plan import UnplannableError

if TYPE_CHECKING:
    from gemini.planner.free_sizes import FreeSizes
    from gemini.planner.resized_plan import PlanPair
    from gemini.planner.step_plan import StepPlan

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_resize_fault(pair: PlanPair, model: nn.Module, call: _Call, values: Sequence[int]) -> str:
    """Return why plans must not be resized by a pair, shown by a call with these free sizes; '' where they may."""
    graph, batch = pair.plan.graph, pair.plan.batch
    count = min(graph.batch_size or 1, batch.count_samples(ModelCall(*call).tensors) or 1)
    part = find_part_like_batch(graph, model, call, batch, count) or slice_call(*call, batch, 0, count)
    if reason := find_hidden_size_read(graph, model, part):
        return reason
    for sizes in _probe_sizes(values):
        reason = _find_other_size(pair, model, (part, call), sizes, count, is_own=tuple(sizes) == tuple(values))
        if reason:
            return f"{reason} at {', '.join(map(str, sizes))}"
    return ""


def _probe_sizes(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the free sizes of a call, and others: smaller ones, and larger odd ones."""
    yield tuple(values)
    yield tuple(max(2, size // 2 + 1) for size in values)
    yield tuple(2 * size + 1 for size in values)


def _find_other_size(
    pair: PlanPair, model: nn.Module, calls: tuple[_Call, _Call], sizes: tuple[int, ...], count: int, *, is_own: bool
) -> str:
    """Return a value or random op whose size is not the predicted one at these free sizes; '' where there is none.

    `count` is the number of samples of the first call, a part of the second.
    """
    part, whole = (_resize_call(one, pair.free, sizes) for one in calls)
    try:
        found = trace_again(pair.plan.graph, model, part)
    except (TraceRefused, Exception) as error:
        return str(error) or type(error).__name__ if is_own else ""
    if guard_facts(found.tracer.guards.values()) != guard_facts(pair.plan.graph.guards):
        return ""
    predicted = at_samples(pair.resize_graph(sizes), count).nodes
    if len(found.nodes) != len(predicted):
        return "the number of its steps"
    for node, expected in zip(found.nodes, predicted, strict=True):
        for key, meta in node.outputs.items():
            twin = expected.outputs.get(key)
            # Inputs that are made up have no gaps between their entries.
            if twin is not None and (meta.shape != twin.shape or (is_own and meta.strides != twin.strides)):
                return f"{expected.name} has shape {meta.shape} instead of {twin.shape}"
    try:
        patterns = _record_patterns(pair.plan, whole)
    except (UnplannableError, RuntimeError, ValueError, IndexError) as error:
        return str(error) if is_own else ""
    return "" if patterns == pair.resize_patterns(sizes) else "its random numbers"


def _record_patterns(plan: StepPlan, call: _Call) -> StagePatterns:
    if plan.shards is None:
        return record_stage_rng(plan.build(), *call, plan.batch)[0]
    return slice_patterns(replace(plan, node_rng=record_divided_rng(plan, call)), plan.shards)


def _resize_call(call: _Call, free: FreeSizes, sizes: Sequence[int]) -> _Call:
    """Return a call with these free sizes: entries are repeated, or cut off."""
    found = ModelCall(*call)
    tensors = []
    for tensor, places in zip(found.tensors, free.places, strict=True):
        for dim, place in enumerate(places):
            if place is not None and sizes[place] != tensor.shape[dim]:
                with torch.no_grad():
                    tensor = tensor.index_select(dim, torch.arange(sizes[place]) % tensor.shape[dim])
        tensors.append(tensor)
    return found.with_tensors(tensors)
