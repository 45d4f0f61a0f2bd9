"""Layer cost: what one layer, the embedding or the head costs on one device for one micro-batch.

    forward ─► input gradient ─► weight gradient           seconds of computation, without communication
    recompute                                              forward work that is repeated before the backward
    parameters, activations, workspace                     bytes and elements it holds
    tensor_bytes, context_bytes, expert_bytes              what it exchanges with other ranks

A model of any kind provides these through `CostModel`; everything above sees only this interface.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from gemini.cluster.device_class import DeviceClass
from gemini.tune.parallel_config import ParallelConfig


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer, for one micro-batch on one device of its tensor, context and expert group."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    recompute: float = 0.0
    attention: float = 0.0  # part of forward that hides context communication
    parameters: float = 0.0  # elements on this device, without experts
    expert_parameters: float = 0.0
    activations: float = 0.0  # bytes kept until the backward
    dropped: float = 0.0  # bytes that recomputation does not keep
    workspace: float = 0.0  # bytes while it runs, on top of what is kept
    boundary: float = 0.0  # bytes of its output that the next stage needs
    tensor_bytes: float = 0.0  # of one tensor-parallel all-reduce
    tensor_reduces: float = 0  # all-reduces of the forward; as many in the backward
    context_bytes: float = 0.0  # keys and values of this rank
    expert_bytes: float = 0.0  # of one all-to-all; two in the forward, two in the backward
    flops: float = 0.0  # operations of the forward on this device
    recomputed_flops: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds of the backward with what it recomputes."""
        return self.input_gradient + self.weight_gradient + self.recompute

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward

    def scaled(self, factor: float) -> LayerCost:
        """Return the costs with all times multiplied, as a reading of the real speed corrects them."""
        names = ("forward", "input_gradient", "weight_gradient", "recompute", "attention")
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def spread_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage: as even as possible, fewer at both ends, which have embedding and head."""
    base, extra = divmod(layers, stages)
    inner_first = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    more = set(inner_first[:extra])
    return tuple(base + (stage in more) for stage in range(stages))


class CostModel(Protocol):
    """A model whose layers have costs under a configuration."""

    @property
    def name(self) -> str:
        """The name of the model."""

    @property
    def layers(self) -> int:
        """The number of layers that a pipeline distributes."""

    @property
    def sequence(self) -> int:
        """Tokens of one sequence; 1 where samples have no sequence."""

    @property
    def parameters(self) -> float:
        """The number of parameters."""

    def model_flops(self, batch: float) -> float:
        """Operations of a step without recomputation."""

    def faults(self, config: ParallelConfig) -> list[str]:
        """Return why this model cannot be split so; empty where it can."""

    def layer_kinds(self, config: ParallelConfig, device: DeviceClass) -> tuple[tuple[LayerCost, int], ...]:
        """Return the layers in order, equal neighbours counted together, embedding and head left out."""

    def layer_counts(self, config: ParallelConfig, device: DeviceClass) -> tuple[int, ...]:
        """Return the number of layers of every stage."""

    @property
    def block_seconds(self) -> float:
        """Seconds that a device spends around each block of a pipeline."""

    def controller_seconds(self, config: ParallelConfig) -> float | None:
        """Seconds of a process that updates the weights of all devices; None where each updates its own."""

    def embedding(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return the part before the layers."""

    def head(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return the part after the layers, loss included."""
