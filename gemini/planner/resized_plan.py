"""Resized plans: the plan of a call whose sizes no earlier call had, from two plans that differ in sizes alone.

At two sequence lengths most models have the same graph but for sizes: same nodes with the same arguments, where sizes
are expressions, same branches, stages and generated source. Then `PlanPair` knows how every size in the plan follows
from those of the call (`free_sizes`). For a further length only the branches on sizes and the proof are evaluated
again; capture, profile, search, code generation and installation are not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.leaf_modules import keep_equal_leaves
from gemini.ir.call_binding import bind, signature_of
from gemini.ir.graph import Graph
from gemini.ir.node import Node, TensorMeta
from gemini.ir.pytree import Path
from gemini.ir.validity import Validity
from gemini.planner.buffer_writes import check_outputs_joinable
from gemini.planner.free_sizes import FreeSizes, Shape, SizeRule, apply_rules
from gemini.planner.microbatch_split import slice_call
from gemini.planner.plan_reuse import is_comparable, work_ratio
from gemini.planner.resize_check import find_resize_fault
from gemini.planner.rng_analysis import StagePatterns
from gemini.planner.shard_sizes import share_layouts
from gemini.planner.sized_graph import at_samples
from gemini.planner.step_plan import ONE_MICRO_BATCH, StepPlan, UnplannableError
from gemini.random_numbers.rng_recorder import RandomOpPattern

_log = logging.getLogger(__name__)
_Key = tuple[str, Path]
_SIZES = ("outputs",)  # fields of nodes that hold sizes; all others must be equal


@dataclass(frozen=True)
class _MetaRules:
    """The rules of the sizes in the metadata of a value."""

    shape: tuple[SizeRule, ...]
    factor: SizeRule
    strides: tuple[SizeRule, ...] | None

    def apply(self, meta: TensorMeta, values: Sequence[int]) -> TensorMeta:
        strides = None if self.strides is None else apply_rules(self.strides, values)
        shape = apply_rules(self.shape, values)
        return replace(meta, shape=shape, batch_factor=self.factor.at(values), strides=strides)


@dataclass(frozen=True, eq=False)
class PlanPair:
    """Two plans that differ in sizes alone, and the rules of these."""

    plan: StepPlan  # the first
    free: FreeSizes
    metas: Mapping[int, Mapping[_Key, _MetaRules]]  # of the nodes with sizes that differ
    patterns: tuple[tuple[tuple[RandomOpPattern, tuple[SizeRule, ...], SizeRule], ...], ...]
    leaves: Mapping[Any, Any]  # proofs of modules that hold for both

    @staticmethod
    def of(
        first: StepPlan, shapes: Sequence[Shape], second: StepPlan, other_shapes: Sequence[Shape]
    ) -> PlanPair | None:
        """Return the pair of two plans, for calls with tensors of these shapes; None where they differ otherwise."""
        if not (_may_resize(first) and _may_resize(second)) or not _have_same_steps(first, second):
            return None
        if first.shards is not None or second.shards is not None:
            divided = share_layouts(second, first)
            if divided is None:
                return None
            second = divided
        free = FreeSizes.between(shapes, other_shapes, first.batch.dims)
        if free is None:
            return None
        try:
            other = at_samples(second.graph, first.graph.batch_size) if _is_whole(first) else second.graph
            if not _have_same_graphs(first.graph, other):
                return None
            metas = _meta_rules(first.graph, other, free)
            patterns = tuple(
                tuple(_pattern_rules(one, other, free) for one, other in zip(stage, also, strict=True))
                for stage, also in zip(first.rng_patterns, second.rng_patterns, strict=True)
            )
        except (_NoRule, ValueError):  # another number of random ops
            return None
        if first.build().sources != second.build().sources:
            return None
        leaves = keep_equal_leaves(first.forms.memo, second.forms.memo)
        return PlanPair(first, free, metas, patterns, leaves)

    def resize(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Sequence[Shape]
    ) -> StepPlan | None:
        """Return the plan of a call with tensors of these shapes; None where it needs one of its own."""
        plan = self.plan
        values = self.free.values(shapes, plan.batch.dims)
        samples = None if values is None else _count_samples(plan, shapes)
        if values is None or samples is None:
            return None
        graph = self.resize_graph(values)
        ratio = work_ratio(graph, plan.graph)
        if not is_comparable(ratio):  # other stages may be better
            return None
        resized = replace(
            plan,
            graph=graph,
            batch=replace(plan.batch, size=samples),
            rng_patterns=self.resize_patterns(values),
            analysis=replace(plan.analysis, step_ms=plan.step_ms * ratio),
            measured=None,
            resized_from=plan,
            _built={},
        )
        return _prove_again(resized, model, (args, kwargs), samples, dict(self.leaves))

    def is_sound(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], shapes: Sequence[Shape]) -> bool:
        """Return whether the rules hold for other sizes, too, shown by a call that can be resized."""
        values = self.free.values(shapes, self.plan.batch.dims)
        fault = "other sizes" if values is None else find_resize_fault(self, model, call, values)
        _log.debug("plans are %s: %s", "not resized" if fault else "resized", fault or "all sizes are as predicted")
        return not fault

    def resize_patterns(self, values: Sequence[int]) -> StagePatterns:
        """Return the random numbers of every stage for these free sizes."""
        return tuple(tuple(_resize_pattern(*one, values) for one in stage) for stage in self.patterns)

    def resize_graph(self, values: Sequence[int]) -> Graph:
        """Return the graph with the sizes that follow from these free sizes."""
        nodes = list(self.plan.graph.nodes)
        for at, rules in self.metas.items():
            node = nodes[at] = copy.copy(nodes[at])
            node.outputs = {
                key: rules[key].apply(meta, values) if key in rules else meta for key, meta in node.outputs.items()
            }
        return replace(self.plan.graph, nodes=nodes, variants=None)


class _NoRule(Exception):
    """A number follows from the free sizes in no known way."""


# ── what two plans must share ──────────────────────────────────────────────────────────────────────────────────────
def _may_resize(plan: StepPlan) -> bool:
    """Return whether a plan is of the kind that is resized: micro-batches without a tail or branches on numbers."""
    return (
        (not plan.single_micro_batch_reason or _is_whole(plan))
        and plan.tail is None
        and plan.branches is None
        and plan.resized_from is None
        and plan.program is None
        and not plan.graph.rolled
        and not plan.uses_host_rng
        and plan.graph.validity is not None
    )


def _is_whole(plan: StepPlan) -> bool:
    """Return whether a plan for shards has one micro-batch, as requested, of a known number of samples."""
    is_requested = plan.shards is not None and plan.single_micro_batch_reason == ONE_MICRO_BATCH
    return is_requested and plan.graph.batch_size is not None


def _have_same_steps(one: StepPlan, other: StepPlan) -> bool:
    return (
        one.partition is other.partition
        and one.schedule is other.schedule
        and (one.micro_batches, one.recompute, one.captured_parts)
        == (other.micro_batches, other.recompute, other.captured_parts)
        and one.buffers_written_once == other.buffers_written_once
        and (one.batch.dims, one.batch.factors) == (other.batch.dims, other.batch.factors)
        and (one.forms.least, one.forms.own_statistics, one.forms.order)
        == (other.forms.least, other.forms.own_statistics, other.forms.order)
    )


def _have_same_graphs(one: Graph, other: Graph) -> bool:
    """Return whether two graphs are equal but for the metadata of their values."""
    mine, theirs = one.validity, other.validity
    if mine is None or theirs is None or len(one) != len(other):
        return False
    facts = [
        (graph.guards, graph.inputs, graph.result, graph.blocks, graph.calls, graph.batch_size, graph.pins,
         graph.whole_batch_guards, held.batch, held.region, held.glue, held.fingerprint)
        for graph, held in ((one, mine), (other, theirs))
    ]  # fmt: skip
    if facts[0] != facts[1] or one.bound_model() is not other.bound_model():
        return False
    return all(_describe(a) == _describe(b) for a, b in zip(one.nodes, other.nodes, strict=True))


def _describe(node: Node) -> dict[str, Any]:
    return {key: value for key, value in vars(node).items() if key not in _SIZES}


def _meta_rules(one: Graph, other: Graph, free: FreeSizes) -> dict[int, dict[_Key, _MetaRules]]:
    found: dict[int, dict[_Key, _MetaRules]] = {}
    for node, also in zip(one.nodes, other.nodes, strict=True):
        if node.outputs.keys() != also.outputs.keys():
            raise _NoRule
        for key, meta in node.outputs.items():
            if meta != (twin := also.outputs[key]):
                if node.is_source and node.kind != "input":  # a tensor of the model that has the size of the call
                    raise _NoRule
                found.setdefault(node.id, {})[key] = _rules_of(meta, twin, free)
    return found


def _rules_of(meta: TensorMeta, twin: TensorMeta, free: FreeSizes) -> _MetaRules:
    changed = replace(twin, shape=meta.shape, batch_factor=meta.batch_factor, strides=meta.strides)
    shape = free.shape_rules(meta.shape, twin.shape)
    factor = free.rule(meta.batch_factor, twin.batch_factor)
    if changed != meta or shape is None or factor is None or (meta.strides is None) != (twin.strides is None):
        raise _NoRule
    strides = None
    if meta.strides is not None and twin.strides is not None:
        strides = free.shape_rules(meta.strides, twin.strides)
        if strides is None:
            raise _NoRule
    return _MetaRules(shape, factor, strides)


# ── random numbers ─────────────────────────────────────────────────────────────────────────────────────────────────
def _pattern_rules(
    one: RandomOpPattern, other: RandomOpPattern, free: FreeSizes
) -> tuple[RandomOpPattern, tuple[SizeRule, ...], SizeRule]:
    shape, factor = free.shape_rules(one.shape, other.shape), free.rule(one.factor, other.factor)
    if replace(other, shape=one.shape, factor=one.factor) != one or shape is None or factor is None:
        raise _NoRule
    return one, shape, factor


def _resize_pattern(
    pattern: RandomOpPattern, shape: Sequence[SizeRule], factor: SizeRule, values: Sequence[int]
) -> RandomOpPattern:
    return replace(pattern, shape=apply_rules(shape, values), factor=factor.at(values))


# ── the new size ───────────────────────────────────────────────────────────────────────────────────────────────────
def _count_samples(plan: StepPlan, shapes: Sequence[Shape]) -> int | None:
    """Return the number of samples of inputs with these shapes; None where they disagree."""
    return plan.batch.count_samples([torch.empty(shape, device="meta") for shape in shapes])


def _prove_again(
    plan: StepPlan, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], samples: int, leaves: dict[Any, Any]
) -> StepPlan | None:
    """Return the plan with the proof at its sizes; None where its proof or a branch on sizes is another."""
    from gemini.batch_analysis.graph_analysis import find_size_branch, prove_graph

    graph, first = plan.graph, plan.forms
    part = slice_call(*call, plan.batch, 0, min(graph.batch_size or 1, samples))
    held = graph.validity
    assert held is not None
    graph.validity = Validity(signature_of(bind(model, *part)), held.batch, held.region, held.glue)
    graph.validity.fingerprint = held.fingerprint
    if _is_whole(plan):  # every stage processes all samples: there is nothing to prove
        return plan
    with torch.random.fork_rng(devices=[]):
        forms = prove_graph(
            graph, *part, first.least, micro_batch_statistics=first.interpreter.micro_batch_statistics, memo=leaves
        )
    if forms.reason or (forms.own_statistics, forms.order) != (first.own_statistics, first.order):
        return None
    if forms.interpreter.decisions.keys() != first.interpreter.decisions.keys():
        return None
    if any(find_size_branch(forms.interpreter, graph, count) for count in _batch_sizes(plan, samples)):
        return None
    try:
        check_outputs_joinable(forms)
    except UnplannableError:
        return None
    return replace(plan, forms=forms)


def _batch_sizes(plan: StepPlan, samples: int) -> Iterator[int]:
    """Yield the numbers of samples with which its graph runs."""
    yield samples
    yield plan.graph.batch_size or 1
