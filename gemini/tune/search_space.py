"""Search space: all configurations of a request, with a cheap lower bound of their memory.

devices ── tensor ── context ── pipeline ── data is the rest
              └ divisors that the model and the hosts admit
batch / data ── micro-batch ── chunks ── ZeRO ── recomputation ── order of the axes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gemini.cluster.cluster_description import Cluster
from gemini.errors import ConfigError
from gemini.schedule.library import LIBRARY
from gemini.schedule.library.schedule_entry import ScheduleEntry
from gemini.schedule.placements import PLACEMENTS
from gemini.tune.layer_cost import CostModel, spread_layers
from gemini.tune.memory_table import CONTEXT, static_rows
from gemini.tune.parallel_config import AXES, RECOMPUTE, ParallelConfig
from gemini.tune.pipeline_run import schedule_faults
from gemini.tune.run_settings import omitted_settings
from gemini.tune.tuning_request import TuningRequest

_MOST_STAGES, _MOST_CHUNKS, _MOST_CONTEXT, _MOST_MICRO_BATCH = 64, 16, 64, 64
_MOST_PARTS = 32  # micro-batches of a run on one machine: each costs messages
_LEAST_CONTEXT_TOKENS = 2048  # tokens per rank below which splitting a sequence only costs
ORDERS = (AXES, ("tensor", "context", "pipeline", "data"))


@dataclass
class Rejections:
    """Why configurations were rejected: how many for each reason, and an example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    least_memory: float = float("inf")  # bytes of the smallest configuration that does not fit

    def add(self, reason: str, example: str) -> None:
        """Record one rejection."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)


def enumerate_configurations(
    request: TuningRequest, cluster: Cluster, rejections: Rejections
) -> Iterator[ParallelConfig]:
    """Yield every configuration on that cluster that can exist; the others are recorded with a reason."""
    model, devices, batch = request.model, cluster.devices, request.batch
    base = {"devices": devices, "batch": batch, **{k: v for k, v in request.fixed.items() if k != "devices"}}
    for tensor in _values(request, "tensor", _tensor_degrees(model, cluster, rejections)):
        for context in _values(request, "context", _context_degrees(model, devices)):
            for pipeline in _values(request, "pipeline", _divisors(devices, min(_MOST_STAGES, model.layers + 2))):
                degrees = f"tensor {tensor}, context {context}, pipeline {pipeline}"
                if devices % (tensor * context * pipeline):
                    if request.fixed.keys() & {"tensor", "context", "pipeline"}:
                        rejections.add(f"the degrees do not divide {devices} devices", degrees)
                    continue
                data = devices // (tensor * context * pipeline)
                if batch % data:
                    rejections.add(f"the batch of {batch} cannot be split over the replicas", f"{degrees}, data {data}")
                    continue
                chosen = {**base, "tensor": tensor, "context": context, "pipeline": pipeline}
                yield from _complete(request, cluster, chosen, data, rejections)


def _complete(
    request: TuningRequest, cluster: Cluster, chosen: dict[str, Any], data: int, rejections: Rejections
) -> Iterator[ParallelConfig]:
    model, local = request.model, request.batch // data
    shards, pipeline = data * chosen["context"], chosen["pipeline"]
    experts = [one for one in _divisors(shards, 512) if _has_experts(model, one)]
    inside = chosen["tensor"] * chosen["context"] * pipeline
    orders = ORDERS if pipeline > 1 and data > 1 and inside <= cluster.devices_per_host else ORDERS[:1]
    recomputes = RECOMPUTE if has_scores(model) else tuple(one for one in RECOMPUTE if one != "attention")
    for micro_batch in _values(request, "micro_batch", _micro_batches(request, local)):
        if local % micro_batch:
            rejections.add(f"micro-batches of {micro_batch} do not divide a replica's share", f"data {data}")
            continue
        count = local // micro_batch
        for expert in _values(request, "expert", experts):
            for chunks in _values(request, "chunks", _chunk_counts(model.layers, pipeline, count)):
                for zero in _values(request, "zero", _zero_levels(shards, pipeline)):
                    for recompute in _values(request, "recompute", recomputes):
                        for order in _values(request, "order", orders):
                            for schedule in _schedules(request, pipeline, chunks, count):
                                values = {
                                    **chosen, "micro_batch": micro_batch, "expert": expert, "chunks": chunks,
                                    "zero": zero, "recompute": recompute, "order": order, "schedule": schedule,
                                }  # fmt: skip
                                config = _build(values, rejections)
                                if config is not None and _admits(request, config, rejections):
                                    yield config


def _build(values: dict[str, Any], rejections: Rejections) -> ParallelConfig | None:
    try:
        return ParallelConfig(**values)
    except ConfigError as error:
        rejections.add(error.faults[0].what, "")
        return None


def _admits(request: TuningRequest, config: ParallelConfig, rejections: Rejections) -> bool:
    model = request.model
    found = [*model.faults(config), *(omitted_settings(config) if request.runs_here else [])]
    if config.stages > model.layers + 2:
        found = [*found, f"more stages than the {model.layers} layers, embedding and head"]
    if not found and config.pipeline > 1:
        found = schedule_faults(config)
    if found:
        rejections.add(found[0], config.label())
    return not found


# ── values of the dimensions ─────────────────────────────────────────────────────────────────────────────────────────
def _values(request: TuningRequest, name: str, default: Iterable[Any]) -> Iterable[Any]:
    if name in request.fixed:
        return (request.fixed[name],)
    return request.among.get(name, default)


def _divisors(number: int, most: int) -> list[int]:
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


def _micro_batches(request: TuningRequest, local: int) -> list[int]:
    """Return micro-batches of samples that a run divides its share into, or of few sequences."""
    if request.runs_here:
        return [one for one in _divisors(local, local) if local // one <= _MOST_PARTS]
    return _divisors(local, _MOST_MICRO_BATCH)


def _tensor_degrees(model: CostModel, cluster: Cluster, rejections: Rejections) -> list[int]:
    """Return degrees inside a host: exchanges of every layer need its links."""
    most = min(cluster.devices, cluster.devices_per_host)
    found = [1]
    for degree in _divisors(most, most)[1:]:
        faults = model.faults(ParallelConfig(devices=degree, batch=1, tensor=degree))
        if faults:
            rejections.add(faults[0], f"tensor {degree}")
        else:
            found.append(degree)
    return found


def _context_degrees(model: CostModel, devices: int) -> list[int]:
    longest = min(_MOST_CONTEXT, max(1, model.sequence // _LEAST_CONTEXT_TOKENS))
    return [one for one in _divisors(devices, longest) if one & (one - 1) == 0]


def _chunk_counts(layers: int, pipeline: int, micro_batches: int) -> list[int]:
    if pipeline == 1:
        return [1]
    most = min(_MOST_CHUNKS, (layers + 2) // pipeline)
    good = [one for one in range(2, most + 1) if layers % (pipeline * one) == 0 or (layers + 2) % (pipeline * one) == 0]
    return [1, *(good if micro_batches >= pipeline else [])]


def _zero_levels(shards: int, pipeline: int) -> tuple[int, ...]:
    if shards == 1:
        return (0,)
    return (1, 3) if pipeline > 1 else (1, 2, 3)


def _has_experts(model: CostModel, degree: int) -> bool:
    held = getattr(getattr(model, "model", None), "experts", 0)
    return degree == 1 if not held else held % degree == 0


def has_scores(model: CostModel) -> bool:
    """Return whether attention stores its scores, so that recomputing it alone saves memory."""
    return not getattr(getattr(model, "model", None), "fused_attention", True)


def _schedules(request: TuningRequest, pipeline: int, chunks: int, count: int) -> Iterable[str]:
    if pipeline == 1:
        return ("auto",)
    if {"schedule"} & {*request.fixed, *request.among}:
        return _values(request, "schedule", ())
    default: tuple[str, ...] = ("auto",) if chunks > 1 else ("1f1b", "zb_h1")
    if request.runs_here:  # its planner tries all that keep the weights of a stage on one worker
        default = tuple(name for name, entry in LIBRARY.items() if _has_chunks(entry, chunks))
    return [name for name in default if name == "auto" or LIBRARY[name].admits(pipeline, count, chunks)]


def _has_chunks(entry: ScheduleEntry, chunks: int) -> bool:
    """Return whether a schedule of the library has that many stages per worker, and each on one worker."""
    if entry.placement == "xshape":
        return False
    return chunks == entry.chunks if entry.chunks else (chunks > 1) == PLACEMENTS[entry.placement].chunked


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def bound_memory(model: CostModel, cluster: Cluster, config: ParallelConfig) -> float:
    """Return bytes that a device of the first stages needs at least, without building the stages."""
    device = cluster.device
    kinds = model.layer_kinds(config, device)
    layers = max(1, model.layers)
    parameters = sum(layer.parameters * count for layer, count in kinds) / config.pipeline
    expert = sum(layer.expert_parameters * count for layer, count in kinds) / config.pipeline
    largest = max(layer.parameters + layer.expert_parameters for layer, _ in kinds)
    static = sum(size for name, size in static_rows(config, parameters, expert, largest) if name != "buffers")
    kept = min(layer.activations for layer, _ in kinds)
    least = min(spread_layers(layers, config.stages)[1:-1] or (layers // config.stages,))
    flight = min(config.micro_batches, config.pipeline - 1) * config.chunks if config.pipeline > 1 else 1
    return static + kept * least * max(1, flight) * 0.9 + CONTEXT
