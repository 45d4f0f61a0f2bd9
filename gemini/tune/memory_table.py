"""Memory table: what holds the memory of a device, row by row.

weights        2 bytes for computation; under ZeRO-3 the shard in single precision is part of the optimizer
gradients      2 or 4 bytes, accumulated over micro-batches; ZeRO-2 and 3 keep a shard
optimizer      a copy of the weights and the state (12 bytes for Adam); a shard from ZeRO-1 on
activations    kept between forward and backward, for as many micro-batches as the schedule has in flight
working set    of one layer while it is recomputed or runs, and the logits
gathered       whole layers under ZeRO-3: the current one and the one prefetched, and its gradient
buffers        of collectives
margin         fragments of the allocator
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini.tune.parallel_config import OPTIMIZERS, ParallelConfig
from gemini.tune.stage_costs import StageCost

MARGIN = 0.02  # of activations and working set
_BUFFER = 2 * 40e6 * 4  # two buckets of 40 M elements, where gradients are reduced in buckets
CONTEXT = 0.8e9  # the driver's and the communication library's own memory, outside of the allocator


@dataclass(frozen=True)
class MemoryTable:
    """Bytes on the device that holds most, by what holds them."""

    rows: tuple[tuple[str, float], ...]
    capacity: float  # bytes a program can allocate
    device: int = 0  # the stage's place in the pipeline

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(size for _, size in self.rows)

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.capacity

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {"bytes": dict(self.rows), "total": self.total, "capacity": self.capacity, "device": self.device}


def static_rows(config: ParallelConfig, parameters: float, expert: float, largest: float) -> list[tuple[str, float]]:
    """Return what does not depend on the micro-batches in flight."""
    whole = parameters + expert
    spread = parameters / config.shards + expert / max(1, config.shards // config.expert)
    weight = 2.0
    gradient = 2.0 if config.pure_bf16 else float(config.reduce_bytes)
    state = OPTIMIZERS["adam_bf16"] if config.pure_bf16 else OPTIMIZERS[config.optimizer]
    if config.precision == "fp32":
        weight, state = 4.0, state - 4.0  # the weights are the single-precision copy
    is_sharded = config.shards > 1
    rows = []
    if config.zero == 3 and is_sharded:
        rows.append(("weights", weight * spread if config.pure_bf16 else 0.0))
    else:
        rows.append(("weights", weight * whole))
    rows.append(("gradients", gradient * (spread if config.zero >= 2 and is_sharded else whole)))
    rows.append(("optimizer", state * (spread if config.zero >= 1 and is_sharded else whole)))
    if config.zero == 3 and is_sharded:
        rows.append(("gathered", (3 * weight + config.reduce_bytes) * largest))
    rows.append(("buffers", min(_BUFFER, 2 * whole) if config.data > 1 and config.zero < 3 else 0.0))
    return rows


def memory_table(
    config: ParallelConfig, stages: list[StageCost], activations: float, capacity: float, device: int = 0
) -> MemoryTable:
    """Return the table of one device, which has `stages` and holds `activations` at its peak."""
    parameters = sum(stage.parameters for stage in stages)
    expert = sum(stage.expert_parameters for stage in stages)
    rows = static_rows(config, parameters, expert, max(stage.largest_layer for stage in stages))
    working = max(stage.workspace for stage in stages)
    received = 2 * max(stage.boundary for stage in stages) if config.pipeline > 1 else 0.0
    rows += [
        ("activations", activations),
        ("working set", working + received),
        ("margin", MARGIN * (activations + working)),
    ]
    return MemoryTable(tuple((name, size) for name, size in rows if size), max(0.0, capacity - CONTEXT), device)
