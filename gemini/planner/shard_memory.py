"""Shard memory: the peak of a worker that runs stages as one shard of several.

The nodes and values of a profile take the share that a shard holds: of a value the largest version that some node
reads, of the temporaries of a node all, or one part per shard where it is divided.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from gemini.collectives.shared_memory_group import SLOT
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.partition.analysis.analysis_result import Analysis, MemoryEstimate
from gemini.planner.stage_memory import StageMemories
from gemini.planner.worker_memory import add_worker_memory
from gemini.profiling.measured_device import MB
from gemini.profiling.node_tensors import tensor_outputs
from gemini.profiling.profile_result import Profile
from gemini.tensor_parallel.layouts import ALL_GATHER, ALL_TO_ALL, REPLICATE, Layout, Partial, Shard, local_size

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.tensor_parallel.shard_plan import ShardPlan, TensorShards

_PAGE = 4096  # bytes


def estimate_workers(plan: StepPlan) -> tuple[MemoryEstimate, ...]:
    """Return the memory of every worker, without optimizer state, which is in the controller."""
    found = (replace(one.memory, optimizer_mb=0.0) for one in plan.analysis.workers)
    return tuple(memory for memory in found for _ in range(plan.shard_count))


def add_shard_memory(plan: StepPlan, shards: ShardPlan) -> Analysis:
    """Return the analysis of a plan with the memory of the largest shard of each group of workers."""
    shares = _value_shares(plan.graph, shards)
    memories = _ShardMemories(plan.graph, _share_profile(plan, shards, shares), plan.micro_batches,
                              recompute=plan.recompute)  # fmt: skip
    memories.shares = shares
    found = add_worker_memory(plan.analysis, plan.partition, memories)
    exchange_mb = _exchange_mb(shards, memories.size_ratio / plan.micro_batches)
    return replace(found, workers=tuple(
        replace(one, memory=replace(
            one.memory,
            transfers_mb=one.memory.transfers_mb + exchange_mb,
            libraries_mb=one.memory.libraries_mb + pages,
            weights_mb=one.memory.weights_mb - weights,
            gradients_mb=max(0.0, one.memory.gradients_mb - gradients),
        ))
        for one in found.workers for weights, gradients, pages in [_saved_mb(plan, shards, one.stages)]
    ))  # fmt: skip


class _ShardMemories(StageMemories):
    """The memory of the stages of one shard."""

    shares: dict[Ref, float]

    def size(self, ref: Ref) -> float:
        """Return the size of the shard's part of a value of one micro-batch (MB)."""
        return super().size(ref) * self.shares.get(ref, 1.0)


def _value_shares(graph: Graph, shards: ShardPlan) -> dict[Ref, float]:
    """Return which part of each value a shard holds, in the largest of its versions."""
    versions: dict[Ref, set[Layout]] = defaultdict(set)
    for one in shards.nodes:
        for ref, layout in (*one.inputs, *one.outputs):
            versions[ref].add(layout)
    for ref in graph.outputs():
        versions[ref].add(REPLICATE)  # the caller and the loss of a script read whole values
    return {
        ref: max(prod(local_size(one, shape, shards.size, 0)) for one in layouts) / max(prod(shape), 1)
        for ref, layouts in versions.items()
        if (ref.source, ref.path) in graph.nodes[ref.node].outputs and (shape := graph.meta(ref).shape) is not None
    }


def _share_profile(plan: StepPlan, shards: ShardPlan, shares: dict[Ref, float]) -> Profile:
    """Return the profile with the sizes of one shard; its times stay."""
    profile = plan.profile
    values = [0.0] * len(profile.values_mb)
    for cost in profile.nodes:
        own = max((shares.get(ref, 1.0) for ref in tensor_outputs(plan.graph.nodes[cost.id])), default=1.0)
        for value in cost.output_values:
            values[value] = max(values[value], own)
    part = {cost.id: _work_part(shards, cost.id) for cost in profile.nodes}
    nodes = tuple(
        replace(
            cost,
            forward_peak_mb=cost.forward_peak_mb * part[cost.id],
            backward_peak_mb=cost.backward_peak_mb * part[cost.id],
            saved_own_mb=cost.saved_own_mb * part[cost.id],
        )
        for cost in profile.nodes
    )
    sizes = tuple(mb * (share or 1.0) for mb, share in zip(profile.values_mb, values, strict=True))
    return replace(profile, nodes=nodes, values_mb=sizes)


def _work_part(shards: ShardPlan, node: int) -> float:
    """Return which part of the memory of a node a shard needs; parts of sums are as large as the whole."""
    one = shards.node(node)
    is_whole = one.is_replicated or any(isinstance(layout, Partial) for _, layout in one.outputs)
    return 1.0 if is_whole else 1 / shards.size


def _exchange_mb(shards: ShardPlan, ratio: float) -> float:
    """Return the shared memory of collectives (MB): two slots per shard, as large as the largest part that it sends."""
    sent = [one.size * ratio / (shards.size if one.name in (ALL_GATHER, ALL_TO_ALL) else 1)
            for one in shards.collectives() if one.phase != "step"]  # fmt: skip
    sizes = dict(shards.bytes)
    sent += [sizes[ref] * ratio / shards.size for ref, layout in shards.results if isinstance(layout, Shard)]
    return 2 * shards.size * min(max(sent, default=0.0), SLOT) / MB


def _touched_bytes(tensor: TensorShards, count: int) -> float:
    """Return the bytes of the pages that hold the slice of a shard: all of them for columns of short rows."""
    if not isinstance(tensor.layout, Shard) or not tensor.bytes:
        return tensor.bytes
    dim, share = tensor.layout.dim, tensor.shard_bytes(count) / tensor.bytes
    period = tensor.bytes / max(1, prod(tensor.shape[:dim]) * tensor.layout.outer)
    return tensor.bytes * min(1.0, share + _PAGE / period)


def _saved_mb(plan: StepPlan, shards: ShardPlan, stages: tuple[int, ...]) -> tuple[float, float, float]:
    """Return what slices save of the weights and gradients of some stages, and the rest of their pages (MB)."""
    nodes = {node for stage in stages for node in plan.partition.stages[stage]}
    names = {name for cost in plan.profile.nodes if cost.id in nodes for name in cost.parameters}
    own = [one for one in shards.tensors if names & set(one.names)]
    pages = {id(one): _touched_bytes(one, shards.size) - one.shard_bytes(shards.size) for one in own}
    trained = [one for one in own if one.trainable]
    weights, gradients = (sum(one.bytes - one.shard_bytes(shards.size) for one in some) for some in (own, trained))
    return weights / MB, gradients / MB, sum(pages[id(one)] for one in (*own, *trained)) / MB
