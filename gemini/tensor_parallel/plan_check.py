"""Plan check: does a shard plan fit its graph? All faults are reported at once."""

from __future__ import annotations

from collections.abc import Iterator

from gemini.errors import ShardingError
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.tensor_parallel.layouts import Layout, Partial, Shard
from gemini.tensor_parallel.shard_plan import LOCAL_OPS, NodeShards, ShardPlan


def check_plan(plan: ShardPlan, graph: Graph) -> None:
    """Raise ShardingError with every fault of a plan for a graph."""
    faults = list(dict.fromkeys(_faults(plan, graph)))
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:12])
        more = f"\n  … {len(faults) - 12} more" if len(faults) > 12 else ""
        raise ShardingError(
            f"the shard plan of {plan.model} does not fit the graph:\n{listed}{more}\n"
            "    → plan again: the model, its shapes or its capture have changed"
        )


def _faults(plan: ShardPlan, graph: Graph) -> Iterator[str]:
    if plan.model != graph.model_name:
        yield f"the plan is of {plan.model}, the graph of {graph.model_name}"
    if plan.size < 1:
        yield f"size {plan.size} is no number of shards"
    known, seen = {ref for ref, _ in plan.inputs}, set()
    for one in plan.nodes:
        if not 0 <= one.node < len(graph.nodes):
            yield f"node {one.node} is not in the graph, which has {len(graph.nodes)}"
            continue
        if one.node in seen:
            yield f"node {one.node} ({graph.nodes[one.node].name}) is planned twice"
        seen.add(one.node)
        yield from _node_faults(plan, graph, one, known)
        known.update(ref for ref, _ in one.outputs)
    for ref, layout in plan.results:
        if ref not in known:
            yield f"the result {ref} is not made by the plan"
        yield from _layout_faults(graph, ref, layout)
    names = [name for one in plan.tensors for name in one.names]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the tensor {name!r} has two layouts"


def _node_faults(plan: ShardPlan, graph: Graph, one: NodeShards, known: set[Ref]) -> Iterator[str]:
    node = graph.nodes[one.node]
    where = f"node {one.node} ({node.name})"
    if one.local not in LOCAL_OPS:
        yield f"{where}: unknown local op {one.local!r}"
    if not node.is_source and {ref for ref, _ in one.inputs} != set(node.inputs()):
        yield f"{where}: the plan lists {len(one.inputs)} inputs, the graph {len(set(node.inputs()))}"
    for ref, layout in one.inputs:
        if 0 <= ref.node < one.node and not graph.nodes[ref.node].outputs:
            continue  # an object that is no tensor
        if ref not in known:
            yield f"{where} reads {ref}, which neither arrives nor is made before"
        yield from _layout_faults(graph, ref, layout)
    for ref, layout in one.outputs:
        yield from _layout_faults(graph, ref, layout)
    listed = {name for tensor in plan.tensors for name in tensor.names} if one.parameters else set()
    for name, _ in one.parameters:
        if name not in listed:
            yield f"{where} reads {name!r}, which has no layout"


def _layout_faults(graph: Graph, ref: Ref, layout: Layout) -> Iterator[str]:
    if not 0 <= ref.node < len(graph.nodes) or (ref.source, ref.path) not in graph.nodes[ref.node].outputs:
        yield f"{ref} is no value of the graph"
        return
    meta = graph.meta(ref)
    if isinstance(layout, Shard):
        if not 0 <= layout.dim < len(meta.shape) or layout.factor < 1 or layout.outer < 1:
            yield f"{ref} of shape {meta.shape} has no slices {layout}"
        elif meta.shape[layout.dim] % layout.entries:
            yield f"{ref}: {meta.shape[layout.dim]} entries of dimension {layout.dim} are no units of {layout.entries}"
    if isinstance(layout, Partial) and not meta.dtype.startswith(("float", "bfloat", "complex")):
        yield f"{ref} of type {meta.dtype} is no sum"
