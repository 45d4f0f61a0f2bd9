"""Shard sizes: layouts that hold for calls of several lengths.

The first plan may divide every dimension. From the second length on, the dimensions whose sizes differ between calls
stay whole, as the one that counts samples does: then layouts and generated source are those of all lengths, and the
same installed stages run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.errors import ShardingError
from gemini.ir.pytree import Ref
from gemini.planner.plan_reuse import describe_nodes
from gemini.tensor_parallel.layouts import Shard
from gemini.tensor_parallel.node_ports import value_bytes
from gemini.tensor_parallel.plan_check import check_plan

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.planner.step_plan import StepPlan
    from gemini.random_numbers.rng_recorder import RandomOpPattern
    from gemini.tensor_parallel.shard_plan import ShardPlan

VaryingDims = Mapping[Ref, frozenset[int]]
Patterns = tuple[tuple["RandomOpPattern", ...], ...]


def find_varying_dims(one: Graph, other: Graph) -> VaryingDims:
    """Return the dimensions of each value whose sizes differ between two graphs with the same nodes."""
    found = {}
    for node, also in zip(one.nodes, other.nodes, strict=True):
        for (source, path), meta in node.outputs.items():
            sizes = zip(meta.shape, also.outputs[source, path].shape, strict=True)
            dims = frozenset(dim for dim, (a, b) in enumerate(sizes) if a != b and dim != meta.batch_dim)
            if dims:
                found[Ref(node.id, source, path)] = dims
    return found


def find_layouts(plan: StepPlan, earlier: Iterable[StepPlan], size: int) -> tuple[ShardPlan | None, VaryingDims]:
    """Return the layouts of an earlier plan that serve this one too, or the dimensions that stay whole in new ones."""
    varying: dict[Ref, frozenset[int]] = {}
    for other in earlier:
        shards = other.shards
        if shards is None or shards.size != size or other.partition is not plan.partition:
            continue
        if describe_nodes(other.graph) != describe_nodes(plan.graph) or not _trains_same(shards, plan.graph):
            continue
        dims = find_varying_dims(other.graph, plan.graph)
        found = resize_shards(shards, plan.graph, dims)
        if found is not None:
            return found, {}
        for ref, own in dims.items():
            varying[ref] = varying.get(ref, frozenset()) | own
    return None, varying


def resize_shards(shards: ShardPlan, graph: Graph, varying: VaryingDims) -> ShardPlan | None:
    """Return the same layouts for a graph of other sizes; None where they divide a dimension that varies."""
    pairs = (pair for one in shards.nodes for pair in (*one.inputs, *one.outputs))
    if any(isinstance(layout, Shard) and layout.dim in varying.get(ref, ()) for ref, layout in pairs):
        return None
    sizes = tuple((ref, value_bytes(graph, ref)) for ref, _ in shards.bytes)
    resized = replace(shards, bytes=sizes)
    try:
        check_plan(resized, graph)
    except ShardingError:
        return None
    return resized


def share_layouts(plan: StepPlan, other: StepPlan) -> StepPlan | None:
    """Return a plan with the layouts of another, for a call of another length; None where these do not serve it."""
    if plan.shards is None or other.shards is None or len(plan.graph) != len(other.graph):
        return None
    if describe_nodes(plan.graph) != describe_nodes(other.graph):
        return None
    shards = resize_shards(other.shards, plan.graph, find_varying_dims(plan.graph, other.graph))
    if shards is None:
        return None
    if shards.nodes == plan.shards.nodes and shards.tensors == plan.shards.tensors:
        return plan
    return replace(plan, shards=shards, rng_patterns=slice_patterns(plan, shards), _built={})


def slice_patterns(plan: StepPlan, shards: ShardPlan) -> Patterns:
    """Return the random numbers of every stage of a plan, with the slice that a shard uses."""
    return tuple(
        tuple(replace(one, shard=shards.node(at).mask) for at in nodes for one in plan.node_rng.get(at, ()))
        for nodes in plan.partition.stages
    )


def _trains_same(shards: ShardPlan, graph: Graph) -> bool:
    """Return whether the parameters that have gradients are those for which layouts were planned."""
    held = dict(graph.bound_model().named_parameters(remove_duplicate=False))
    return all(
        name in held and held[name].requires_grad == one.trainable for one in shards.tensors for name in one.names
    )
