"""Parallel configuration: how a training step is spread over devices.

    devices = data × tensor × context × pipeline          batch = data × micro_batches × micro_batch

    order   innermost axis first: ranks of one tensor group are neighbours
            tensor → context → data → pipeline:   rank = t + T·(c + C·(d + D·p))

Experts are spread over the data and context ranks: `expert` of them hold different experts, the rest replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy

AXES = ("tensor", "context", "data", "pipeline")
RECOMPUTE = ("none", "attention", "selective", "full")
OPTIMIZERS = {"adam": 12.0, "adam_bf16": 4.0, "momentum": 8.0, "sgd": 4.0}
"""Bytes per parameter of the optimizer's state, a single-precision copy of the weights included (not for adam_bf16)."""
KERNELS = ("eager", "fused", "compiled")
ATTENTION = ("flash", "tuned", "triton")
SWITCHES = ("sequence_parallel", "pure_bf16", "overlap_data", "fused_loss")
_DEGREES = ("tensor", "context", "expert", "pipeline", "chunks", "micro_batch", "batch", "devices")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The degrees and the switches of one configuration.

    `recompute` of `recompute_layers` layers (all): `attention` recomputes the attention core, `selective` what lies
    between matrix products and half of these, `full` the whole layer. `tensor_overlap` is the share of tensor-parallel
    communication that runs during products. `kernels`: elementwise operations one by one (eager), fused by hand, or
    fused by a compiler, which also recomputes what is cheap. Gradients have `reduce_bytes` per element in memory and on
    the wire.
    """

    devices: int
    batch: int  # sequences per step
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    chunks: int = 1  # stages per device
    micro_batch: int = 1
    zero: int = 0
    recompute: str = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = True
    precision: str = "bf16"
    schedule: str = "auto"
    kernels: str = "fused"
    attention: str = "flash"  # of fused attention: FlashAttention 2, tuned for the device (cuDNN, version 3), Triton
    fused_loss: bool = False
    optimizer: str = "adam"
    pure_bf16: bool = False  # parameters, gradients and optimizer state in 16 bits
    overlap_data: bool = True
    tensor_overlap: float = 0.0
    reduce_bytes: int = 4
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        faults = [
            Fault(f"{name} = {getattr(self, name)!r}", "give a whole number, 1 or more")
            for name in _DEGREES
            if not _is_count(getattr(self, name))
        ]
        for name, known in (
            ("recompute", RECOMPUTE),
            ("kernels", KERNELS),
            ("attention", ATTENTION),
            ("optimizer", tuple(OPTIMIZERS)),
        ):
            if getattr(self, name) not in known:
                faults.append(Fault(f"unknown {name} {getattr(self, name)!r}", remedy(str(getattr(self, name)), known)))
        faults += self._range_faults()
        if not faults:
            faults = list(self._contradictions())
        if faults:
            raise ConfigError(faults, "parallel configuration")

    def _range_faults(self) -> list[Fault]:
        faults = []
        if self.zero not in (0, 1, 2, 3):
            faults.append(Fault(f"zero = {self.zero!r}", "give 0, 1, 2 or 3"))
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                faults.append(Fault(f"{name} = {getattr(self, name)!r}", "give true or false"))
        for name in ("precision", "schedule"):
            if not isinstance(getattr(self, name), str):
                faults.append(Fault(f"{name} = {getattr(self, name)!r}", "give a name"))
        share = self.tensor_overlap
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            faults.append(Fault(f"tensor_overlap = {self.tensor_overlap!r}", "give a share from 0 to 1"))
        if sorted(map(str, self.order)) != sorted(AXES):
            faults.append(Fault(f"order = {list(self.order)}", f"give the axes {', '.join(AXES)}, innermost first"))
        count = self.recompute_layers
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            faults.append(Fault(f"recompute_layers = {count!r}", "give a number of layers, 0 or more"))
        if self.reduce_bytes not in (2, 4):
            faults.append(Fault(f"reduce_bytes = {self.reduce_bytes!r}", "give 2 or 4"))
        return faults

    def _contradictions(self) -> list[Fault]:
        faults = []
        used = self.tensor * self.context * self.pipeline
        if self.devices % used:
            what = (
                f"{self.devices} devices for tensor {self.tensor} × context {self.context} × pipeline {self.pipeline}"
            )
            faults.append(Fault(what, f"give a multiple of {used} devices, or other degrees"))
            return faults
        if self.batch % (self.data * self.micro_batch):
            near = self.data * self.micro_batch
            what = f"batch {self.batch} over {self.data} replicas in micro-batches of {self.micro_batch}"
            faults.append(Fault(what, f"give a multiple of {near} sequences, such as {_nearest(self.batch, near)}"))
        if self.data * self.context % self.expert:
            what = f"expert {self.expert} over data {self.data} × context {self.context}"
            faults.append(Fault(what, f"give a divisor of {self.data * self.context}"))
        if self.chunks > 1 and self.pipeline == 1:
            faults.append(Fault(f"chunks = {self.chunks} without a pipeline", "give pipeline 2 or more, or chunks 1"))
        return faults

    # ── degrees ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def data(self) -> int:
        """The number of replicas."""
        return self.devices // (self.tensor * self.context * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one replica per step."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def shards(self) -> int:
        """The ranks over which ZeRO spreads states: data and context."""
        return self.data * self.context

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.pipeline * self.chunks

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether norms and residuals are split over the tensor ranks."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def plan_name(self) -> str:
        """The name of the schedule, `auto` resolved."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.chunks == 1 else "interleaved_1f1b"

    def stride(self, axis: str) -> int:
        """The distance of neighbours on an axis, in ranks."""
        at = self.order.index(axis)
        return math.prod(getattr(self, name) for name in self.order[:at])

    @property
    def kind(self) -> str:
        """What divides the work: `pipeline`, `sharding`, `replicas`, several of them, or `one device`."""
        degrees = (("replicas", self.data), ("sharding", self.tensor), ("pipeline", self.pipeline))
        found = [name for name, degree in degrees if degree > 1]
        return " with ".join(found) or "one device"

    def label(self) -> str:
        """Return the configuration in a few words."""
        parts = [f"{name} {getattr(self, name)}" for name in ("data", "tensor", "context", "expert", "pipeline")]
        shown = [part for part in parts if not part.endswith(" 1")] or ["one device"]
        if self.chunks > 1:
            shown.append(f"chunks {self.chunks}")
        shown.append(f"micro-batch {self.micro_batch}×{self.micro_batches}")
        if self.zero:
            shown.append(f"ZeRO {self.zero}")
        if self.recompute != "none":
            count = "" if self.recompute_layers is None else f" of {self.recompute_layers} layers"
            shown.append(f"recompute {self.recompute}{count}")
        if self.pipeline > 1:
            shown.append(self.plan_name)
        if self.order != AXES:
            shown.append("order " + "-".join(self.order))
        return ", ".join(shown)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values that `read_parallel` reads back."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "order": list(self.order)}


def read_parallel(data: Any, source: str = "parallel configuration") -> ParallelConfig:
    """Build a configuration from plain data; all unknown and missing keys are reported at once."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            [Fault(f"{data!r} is no parallel configuration", 'write {"devices": 8, "batch": 64}')], source
        )
    names = [entry.name for entry in fields(ParallelConfig)]
    faults = [Fault(f"unknown key {key!r}", remedy(str(key), names)) for key in data if key not in names]
    faults += [Fault(f"no {name}", f"give {name}") for name in ("devices", "batch") if name not in data]
    if faults:
        raise ConfigError(faults, source)
    return ParallelConfig(**data)


def field_faults(name: str, value: Any) -> list[Fault]:
    """Return the faults of one field, with others that contradict no value of it."""
    count = value if _is_count(value) else 1
    rest: dict[str, Any] = {"devices": 1, "batch": 1}
    if name in ("tensor", "context", "pipeline", "expert", "devices"):
        rest = {"devices": count, "batch": count}
    elif name in ("batch", "micro_batch"):
        rest["batch"] = count
    elif name == "chunks":
        rest |= {"devices": 2, "pipeline": 2}
    try:
        ParallelConfig(**{**rest, name: value})
    except ConfigError as error:
        return list(error.faults)
    return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nearest(number: int, step: int) -> int:
    return max(1, round(number / step)) * step
