"""Stage costs: layers on the stages of a pipeline, with the communication that runs inside a stage.

    126 layers on 16 stages      7 8 8 … 8 7          the embedding is on the first stage, the head on the last

    forward        computation + exposed tensor, context and expert exchanges + gathers of ZeRO-3 that stay visible
    backward       input gradient, weight gradient and recomputation, and the same exchanges

A ZeRO-3 gather of the next layer runs during the computation of this one: what exceeds it is exposed. While a
collective and computation run together, computation loses `overlap_loss` of the collective's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemini.cluster.device_class import DeviceClass
from gemini.tune.layer_cost import CostModel, LayerCost
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.rank_communication import RankCommunication

_GATHER_COPY, _SCATTER_COPY = 4, 6  # bytes per parameter that ZeRO copies to and from the buffers of collectives
KINDS = ("compute", "recompute", "tensor", "context", "expert", "data")


@dataclass(frozen=True)
class StageCost:
    """One stage, for one micro-batch: seconds of its blocks, and the parts of these by kind."""

    forward: float
    input_gradient: float
    weight_gradient: float
    parts: dict[str, float] = field(hash=False)
    parameters: float = 0.0
    expert_parameters: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    boundary: float = 0.0
    largest_layer: float = 0.0  # parameters of the largest layer, which ZeRO-3 gathers
    flops: float = 0.0
    recomputed_flops: float = 0.0
    layers: int = 0

    @property
    def backward(self) -> float:
        """Seconds of the whole backward."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass
class _Sum:
    """Seconds and sizes of the layers of a stage so far."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    largest: float = 0.0
    flops: float = 0.0
    recomputed_flops: float = 0.0


class StageBuilder:
    """Adds layers up to stages, for one configuration on one device class."""

    def __init__(self, model: CostModel, config: ParallelConfig, device: DeviceClass, links: RankCommunication) -> None:
        self.model, self.config, self.device, self.links = model, config, device, links
        self.first = model.embedding(config, device)
        self.last = model.head(config, device)
        self.kinds = model.layer_kinds(config, device)
        self.recomputing = config.recompute_layers

    def stages(self, counts: Sequence[int] | None = None) -> tuple[StageCost, ...]:
        """Return all stages, with an even number of layers unless `counts` says how many each has."""
        counts = counts or self.model.layer_counts(self.config, self.device)
        found: list[StageCost] = []
        cache: dict[tuple[object, ...], StageCost] = {}
        done = 0
        for stage, count in enumerate(counts):
            held = self._layers_between(done, done + count)
            key = (stage == 0, stage == len(counts) - 1, tuple((id(layer), number) for layer, number in held))
            if key not in cache:
                cache[key] = self._stage(held, is_first=key[0] is True, is_last=key[1] is True)
            found.append(cache[key])
            done += count
        return tuple(found)

    def _layers_between(self, begin: int, end: int) -> list[tuple[LayerCost, int]]:
        if len(self.kinds) == 1:
            return [(self.kinds[0][0], end - begin)] if end > begin else []
        held, at = [], 0
        for layer, count in self.kinds:
            overlap = min(end, at + count) - max(begin, at)
            if overlap > 0:
                held.append((layer, overlap))
            at += count
        return held

    def _stage(self, held: list[tuple[LayerCost, int]], *, is_first: bool, is_last: bool) -> StageCost:
        config, total = self.config, _Sum()
        parts = dict.fromkeys(KINDS, 0.0)
        ends = [*([self.first] if is_first else []), *([self.last] if is_last else [])]
        layers = sum(count for _, count in held)
        share = 1.0 if self.recomputing is None else min(1.0, self.recomputing / max(1, self.model.layers))
        for layer, count in [*held, *((end, 1) for end in ends)]:
            self._add(total, parts, layer, count, 1.0 if layer in ends else share)
        if config.zero == 3 and config.shards > 1:
            self._expose_ends(total, parts, [layer for layer, _ in held] or ends)
        sample = held[-1][0] if held else self.first
        around = self.model.block_seconds if config.devices > 1 else 0.0
        parts["compute"] += 2 * around
        return StageCost(
            total.forward + around, total.input_gradient + around, total.weight_gradient, parts, total.parameters,
            total.expert_parameters, total.activations, total.workspace, sample.boundary, total.largest, total.flops,
            total.recomputed_flops, layers,
        )  # fmt: skip

    def _add(self, total: _Sum, parts: dict[str, float], layer: LayerCost, count: int, share: float) -> None:
        """Add equal layers; `share` of them recompute."""
        links = self.links
        tensor = links.tensor_seconds(layer)
        context = links.context_seconds(layer, layer.attention), links.context_seconds(layer, 2.5 * layer.attention)
        expert = links.expert_seconds(layer)
        repeated = layer.recompute * share
        again = (tensor + context[0] + expert) * share if self.config.recompute == "full" and layer.recompute else 0.0
        forward = layer.forward + tensor + context[0] + expert
        late = layer.input_gradient + repeated + tensor + context[1] + expert + again
        weight = layer.weight_gradient
        data = self._gather_exposure(layer, forward, late + weight)
        total.forward += count * (forward + data[0])
        total.input_gradient += count * (late + data[1])
        total.weight_gradient += count * weight
        parts["compute"] += count * (layer.forward + layer.input_gradient + weight)
        parts["recompute"] += count * repeated
        parts["tensor"] += count * tensor * (2 + (share if again else 0))
        parts["context"] += count * (context[0] * (1 + (share if again else 0)) + context[1])
        parts["expert"] += count * expert * (2 + (share if again else 0))
        parts["data"] += count * sum(data)
        total.parameters += count * layer.parameters
        total.expert_parameters += count * layer.expert_parameters
        kept = layer.activations + (1 - share) * layer.dropped
        total.activations += count * kept
        total.workspace = max(total.workspace, layer.workspace)
        total.largest = max(total.largest, layer.parameters + layer.expert_parameters)
        total.flops += count * layer.flops
        total.recomputed_flops += count * layer.recomputed_flops * share

    def _gather_exposure(self, layer: LayerCost, forward: float, backward: float) -> tuple[float, float]:
        """Return what ZeRO-3 (and ZeRO-2, which reduces every micro-batch) adds to a forward and to a backward."""
        config, links = self.config, self.links
        if config.zero < 2 or config.shards < 2:
            return 0.0, 0.0
        gather = links.gather_seconds(layer) if config.zero == 3 else 0.0
        scatter = links.scatter_seconds(layer)
        held = layer.parameters + layer.expert_parameters
        copied = self.device.traffic_seconds(_GATHER_COPY * held) if gather else 0.0
        late = copied + self.device.traffic_seconds(_SCATTER_COPY * held)
        if not config.overlap_data:
            return gather + copied, gather + scatter + late
        return self._exposed(gather, forward) + copied, self._exposed(gather + scatter, backward) + late

    def _exposed(self, communication: float, computation: float) -> float:
        hidden = min(communication, computation)
        return communication - hidden + self.device.overlap_loss * hidden

    def _expose_ends(self, total: _Sum, parts: dict[str, float], layers: list[LayerCost]) -> None:
        """Add the first gather and the last reduction of a micro-batch, which have nothing to hide behind."""
        if not layers or not self.config.overlap_data:
            return
        gather, scatter = self.links.gather_seconds(layers[0]), self.links.scatter_seconds(layers[0])
        total.forward += gather
        total.input_gradient += scatter
        parts["data"] += gather + scatter
