"""Machine costs: a captured model on the workers of this machine, node by node.

    embed │ norm │ qkv │ attention │ out │ … │ head          nodes of the graph; a pipeline may be cut between any two
      ▲ time in a worker, at two sizes of a micro-batch       ▲ bytes that cross the cut
      └ per number of shards: the share that each computes, and what they exchange

Times are those of the planner: delayed weight gradients, the loss, and the contention of workers that compute at the
same time are part of them. What a step takes outside of its blocks is the controller's: see `controller_seconds`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gemini.cluster.device_class import DeviceClass
from gemini.tensor_parallel.shard_costs import ShardCosts
from gemini.tune.layer_cost import LayerCost
from gemini.tune.parallel_config import ParallelConfig

_LINK_GB = ShardCosts().link_gb
_SLACK = 0.02  # of the slowest stage, for cuts that fewer bytes cross
_SCRIPT = (("context", 1), ("expert", 1), ("zero", 0), ("recompute", "none"))


@dataclass(frozen=True)
class NodeShare:
    """A node on one of several shards: the share of its time, and its exchanges per micro-batch."""

    work: float
    nbytes: float = 0.0  # as an all-reduce of so many bytes
    exchanges: int = 0  # forward and backward


@dataclass(frozen=True)
class NodeTime:
    """One node, measured on the batches of `MachineCosts`; seconds, bytes and elements."""

    name: str
    forward: tuple[float, float]  # on the smaller and on the larger batch
    backward: tuple[float, float]
    weight_share: float  # of the backward
    parameters: float
    saved: float
    crossing: float  # bytes of values that nodes after it read
    flops: float
    shares: Mapping[int, NodeShare] = field(default_factory=dict, hash=False)  # by number of shards


@dataclass(frozen=True)
class MachineCosts:
    """The `CostModel` of a model on this machine. `sizes` are the samples of the two measured batches."""

    name: str
    chain: tuple[NodeTime, ...]
    sizes: tuple[float, float]
    parameters: float
    alone: float = 0.0  # seconds per sample of a step in one process on all processors; 0: unknown
    action: float = 0.0  # seconds of a worker around each block
    step: float = 0.0  # seconds of the controller per step with workers
    update: float = 0.0  # seconds of the optimizer
    summed: Mapping[int, float] = field(default_factory=dict, hash=False)  # bytes summed per step, by number of shards
    undivided: Mapping[int, str] = field(default_factory=dict, hash=False)  # why so many shards are impossible
    coupled: str = ""  # why the batch must stay one micro-batch; '': it may be split
    sequence: int = 1

    @property
    def samples(self) -> int:
        """The size of the larger batch."""
        return round(self.sizes[1])

    @property
    def layers(self) -> int:
        """The number of nodes."""
        return len(self.chain)

    @property
    def block_seconds(self) -> float:
        """Seconds of a worker around each block of a pipeline."""
        return self.action

    def controller_seconds(self, config: ParallelConfig) -> float:
        """Return what the process of the script does per step: the optimizer, and with workers calls and replies."""
        summed = 2 * (config.tensor - 1) / config.tensor * self.summed.get(config.tensor, 0.0) / (_LINK_GB * 1e9)
        return self.update + summed + (self.step if config.devices > 1 else 0.0)

    def model_flops(self, batch: float) -> float:
        """Operations of a step."""
        return 3 * sum(node.flops for node in self.chain) * batch / self.samples

    def faults(self, config: ParallelConfig) -> list[str]:
        """Return why a run on this machine cannot have this configuration."""
        found = [f"{name} {getattr(config, name)} on this machine" for name, only in _SCRIPT if
                 getattr(config, name) != only]  # fmt: skip
        if self.coupled and config.micro_batch != config.batch:
            found.append(f"micro-batches: {self.coupled}")
        if config.stages > self.layers:
            found.append(f"{config.stages} stages of {self.layers} operators")
        if config.tensor > 1 and not all(config.tensor in node.shares for node in self.chain):
            reason = self.undivided.get(config.tensor, "not examined")
            found.append(f"its operators cannot be divided over {config.tensor} workers: {reason}")
        return found

    def layer_kinds(self, config: ParallelConfig, device: DeviceClass) -> tuple[tuple[LayerCost, int], ...]:
        """Return the nodes in order."""
        del device  # times are measured
        scale = 1.0
        if config.devices == 1 and self.alone:
            own = sum(sum(self._seconds(node, config.micro_batch)) for node in self.chain)
            scale = self.alone * config.micro_batch / own if own else 1.0
        return _kinds(self, config.micro_batch, config.tensor, round(scale, 6))

    def embedding(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return nothing: every node is in the chain."""
        del config, device
        return LayerCost()

    head = embedding

    def layer_counts(self, config: ParallelConfig, device: DeviceClass) -> tuple[int, ...]:
        """Return the nodes of every stage: equal times, and of these the fewest bytes between stages."""
        if config.stages == 1:
            return (self.layers,)
        return balance_nodes(self.layer_kinds(config, device), config.stages)

    def cost(self, node: NodeTime, micro_batch: int, tensor: int, scale: float) -> LayerCost:
        """Return the cost of a node."""
        share = node.shares[tensor] if tensor > 1 else NodeShare(1.0)
        part, work = micro_batch / self.samples, share.work * scale
        forward, backward = self._seconds(node, micro_batch)
        return LayerCost(
            forward=forward * work,
            input_gradient=backward * work * (1 - node.weight_share),
            weight_gradient=backward * work * node.weight_share,
            parameters=node.parameters * (share.work if node.parameters else 1.0),
            activations=node.saved * part * share.work,
            boundary=node.crossing * part,
            tensor_bytes=share.nbytes * part / max(1, share.exchanges),
            tensor_reduces=share.exchanges / 2,
            flops=node.flops * part * share.work,
        )

    def _seconds(self, node: NodeTime, samples: int) -> tuple[float, float]:
        return interpolate(self.sizes, node.forward, samples), interpolate(self.sizes, node.backward, samples)


def interpolate(sizes: tuple[float, float], times: tuple[float, float], samples: float) -> float:
    """Return the time of that many samples: on the line through both readings, which has no time below zero at 0."""
    (small, large), (early, late) = sizes, times
    if small == large:
        return late * samples / large
    slope = (late - early) / (large - small)
    if samples >= small and slope >= 0:
        return early + slope * (samples - small)
    fixed = min(max(0.0, early - slope * small), early)  # of a call without samples
    return fixed + (early - fixed) * samples / small


@functools.lru_cache(maxsize=1024)
def _kinds(model: MachineCosts, micro_batch: int, tensor: int, scale: float) -> tuple[tuple[LayerCost, int], ...]:
    return tuple((model.cost(node, micro_batch, tensor, scale), 1) for node in model.chain)


@functools.lru_cache(maxsize=1024)
def balance_nodes(kinds: tuple[tuple[LayerCost, int], ...], stages: int) -> tuple[int, ...]:
    """Return the number of nodes per stage: the least slowest stage, and within a slack the fewest bytes."""
    loads = [0.0, *accumulate(layer.total for layer, _ in kinds)]
    count = len(kinds)
    stages = min(stages, count)
    low, high = max(loads[-1] / stages, *(late - early for early, late in pairwise(loads))), loads[-1]
    for _ in range(40):
        middle = (low + high) / 2
        if _stages_within(loads, middle) <= stages:
            high = middle
        else:
            low = middle
    limit = high * (1 + _SLACK)
    # least[k][j]: bytes of the cheapest division of the first j nodes into k stages
    least: list[list[tuple[float, int]]] = [[(0.0 if at == 0 else float("inf"), 0) for at in range(count + 1)]]
    for stage in range(1, stages + 1):
        row = [(float("inf"), 0)] * (count + 1)
        for end in range(stage, count + 1):
            begin = end - 1
            while begin >= 0 and loads[end] - loads[begin] <= limit:
                cost = least[-1][begin][0] + (kinds[end - 1][0].boundary if end < count else 0.0)
                if cost < row[end][0]:
                    row[end] = (cost, begin)
                begin -= 1
        least.append(row)
    ends, at = [], count
    for stage in range(stages, 0, -1):
        begin = least[stage][at][1]
        ends.append(at - begin)
        at = begin
    return tuple(reversed(ends))


def _stages_within(loads: Sequence[float], limit: float) -> int:
    """Return the stages that a division takes from the front, none slower than `limit`."""
    stages, begin = 1, 0.0
    for early, late in pairwise(loads):
        if late - begin > limit * (1 + 1e-9):
            stages, begin = stages + 1, early
    return stages


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_costs(costs: MachineCosts, path: Path) -> None:
    """Write costs as JSON, for the process that tunes."""
    path.write_text(json.dumps(asdict(costs)), encoding="utf-8")


def load_costs(path: Path) -> MachineCosts:
    """Read a file written by `save_costs`."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    data["chain"] = tuple(_read_node(node) for node in data["chain"])
    data["sizes"] = tuple(data["sizes"])
    for name in ("summed", "undivided"):
        data[name] = {int(key): value for key, value in data[name].items()}
    return MachineCosts(**data)


def _read_node(data: dict[str, Any]) -> NodeTime:
    data["shares"] = {int(key): NodeShare(**value) for key, value in data["shares"].items()}
    data["forward"], data["backward"] = tuple(data["forward"]), tuple(data["backward"])
    return NodeTime(**data)
