"""Worker memory: the predicted peak of every worker of a plan, also where shards divide its stages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.partition.analysis.analysis_result import MemoryEstimate
from gemini.tensor_parallel.layouts import local_size

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.tensor_parallel.shard_plan import ShardPlan


def estimate_workers(plan: StepPlan) -> tuple[MemoryEstimate, ...]:
    """Return the memory of every worker, without optimizer state, which is in the controller."""
    rows = []
    for one in plan.analysis.workers:
        memory = replace(one.memory, optimizer_mb=0.0)
        if plan.shards is not None:
            nodes = [node for stage in one.stages for node in plan.partition.stages[stage]]
            memory = _of_shard(plan, plan.shards, nodes, memory)
        rows += [memory] * plan.shard_count
    return tuple(rows)


def _of_shard(plan: StepPlan, shards: ShardPlan, nodes: list[int], whole: MemoryEstimate) -> MemoryEstimate:
    """Return the memory of one shard of some nodes, from that of the undivided nodes."""
    names = {shards.tensor(name).name for node in nodes for name, _ in shards.node(node).parameters}
    tensors = [shards.tensor(name) for name in names]
    weights = _share([(one.bytes, one.shard_bytes(shards.size)) for one in tensors])
    gradients = _share([(one.bytes, one.shard_bytes(shards.size)) for one in tensors if one.trainable])
    sizes, own, kept = dict(shards.bytes), set(nodes), []
    for ref in shards.grads:
        if ref.node in own:
            shape = plan.graph.meta(ref).shape
            part = math.prod(local_size(shards.produced(ref), shape, shards.size, 0)) / max(math.prod(shape), 1)
            kept.append((sizes.get(ref, 0), sizes.get(ref, 0) * part))
    return replace(
        whole,
        weights_mb=whole.weights_mb * weights,
        gradients_mb=whole.gradients_mb * gradients,
        activations_mb=whole.activations_mb * _share(kept),
    )


def _share(pairs: list[tuple[int, float]]) -> float:
    whole = sum(size for size, _ in pairs)
    return sum(part for _, part in pairs) / whole if whole else 1.0
