"""Rank communication: the time of every exchange of a configuration on the links where its ranks lie.

tensor      all-reduce of a layer's output, or all-gather and reduce-scatter with sequence parallelism
context     keys and values around a ring, hidden behind attention
expert      all-to-all of the tokens before and after the experts
data        gradients (and parameters under ZeRO) of a stage, hidden behind backward and forward
pipeline    the boundary of two stages
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemini.cluster.cluster_description import Cluster
from gemini.cluster.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, send
from gemini.cluster.rank_group import RankGroup, group_on
from gemini.tune.layer_cost import LayerCost
from gemini.tune.parallel_config import ParallelConfig

GATHERED_BYTES = 2  # per parameter that ZeRO gathers for computation


@dataclass(frozen=True)
class RankCommunication:
    """Exchanges of one configuration on one cluster; seconds."""

    cluster: Cluster
    config: ParallelConfig

    @cached_property
    def tensor_group(self) -> RankGroup:
        """The ranks that share a layer."""
        return group_on(self.cluster, self.config.tensor, self.config.stride("tensor"))

    @cached_property
    def context_group(self) -> RankGroup:
        """The ranks that share a sequence."""
        return group_on(self.cluster, self.config.context, self.config.stride("context"))

    @cached_property
    def shard_group(self) -> RankGroup:
        """The ranks that have the same parameters: data and context."""
        stride = min(self.config.stride("data"), self.config.stride("context"))
        return group_on(self.cluster, self.config.shards, stride)

    @cached_property
    def expert_group(self) -> RankGroup:
        """The ranks that have different experts of one layer."""
        stride = min(self.config.stride("data"), self.config.stride("context"))
        return group_on(self.cluster, self.config.expert, stride)

    @cached_property
    def expert_shard_group(self) -> RankGroup:
        """The ranks that have the same experts."""
        stride = min(self.config.stride("data"), self.config.stride("context"))
        return group_on(self.cluster, self.config.shards // self.config.expert, stride * self.config.expert)

    @cached_property
    def pipeline_group(self) -> RankGroup:
        """The stages of one pipeline."""
        return group_on(self.cluster, self.config.pipeline, self.config.stride("pipeline"))

    # ── per layer and micro-batch ────────────────────────────────────────────────────────────────────────────────────
    def tensor_seconds(self, layer: LayerCost) -> float:
        """Return the exposed time of the tensor-parallel exchanges of a forward; the backward has as many."""
        if not layer.tensor_reduces:
            return 0.0
        group, nbytes = self.tensor_group, layer.tensor_bytes
        if self.config.is_sequence_parallel:
            once = all_gather(group, nbytes) + reduce_scatter(group, nbytes)
        else:
            once = all_reduce(group, nbytes)
        return layer.tensor_reduces * once * (1 - self.config.tensor_overlap)

    def context_seconds(self, layer: LayerCost, hidden_by: float) -> float:
        """Return the exposed time of the ring of keys and values; each pass hides behind a part of attention."""
        ranks = self.config.context
        if ranks < 2:
            return 0.0
        once = send(self.context_group, layer.context_bytes)
        return (ranks - 1) * max(0.0, once - hidden_by / ranks)

    def expert_seconds(self, layer: LayerCost) -> float:
        """Return the time of both all-to-alls of a forward; the backward has as many."""
        return 2 * all_to_all(self.expert_group, layer.expert_bytes) if layer.expert_bytes else 0.0

    # ── per stage and step ───────────────────────────────────────────────────────────────────────────────────────────
    def gather_seconds(self, layer: LayerCost) -> float:
        """Return the time to gather the parameters of a layer."""
        return all_gather(self.shard_group, GATHERED_BYTES * layer.parameters) + all_gather(
            self.expert_shard_group, GATHERED_BYTES * layer.expert_parameters
        )

    def scatter_seconds(self, layer: LayerCost) -> float:
        """Return the time to reduce the gradients of a layer to their shards."""
        width = self.config.reduce_bytes
        return reduce_scatter(self.shard_group, width * layer.parameters) + reduce_scatter(
            self.expert_shard_group, width * layer.expert_parameters
        )

    def reduce_seconds(self, parameters: float, expert_parameters: float) -> float:
        """Return the time to add up gradients in all replicas."""
        width = self.config.reduce_bytes
        return all_reduce(self.shard_group, width * parameters) + all_reduce(
            self.expert_shard_group, width * expert_parameters
        )

    def hop(self, nbytes: float) -> float:
        """Return the time of a transfer between neighbouring stages."""
        return send(self.pipeline_group, nbytes) if self.config.pipeline > 1 else 0.0

    def tie_seconds(self, parameters: float) -> float:
        """Return the time to add the gradients of an embedding that the first and the last stage share."""
        if self.config.pipeline < 2 or not parameters:
            return 0.0
        ends = group_on(self.cluster, 2, self.config.stride("pipeline") * (self.config.pipeline - 1))
        return all_reduce(ends, self.config.reduce_bytes * parameters)
