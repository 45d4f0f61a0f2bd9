"""Pipeline run: the time of all micro-batches by the real schedule, and by closed form.

    closed form     1F1B, GPipe         N·t + (P − 1)·t                      t: forward and backward of a stage
                    interleaved         N·t + (P − 1)·t / v                  v: chunks per device
                    zero bubble (H1)    N·t + (P − 1)·(F + I − W)
                    zero bubble (H2)    N·t + a fill of (P − 1)·F

The simulation takes the plan of `gemini.schedule` with the times of each stage and the links between them. A plan
repeats its steady state, so that of very many micro-batches is simulated in part and continued at its period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy
from gemini.schedule.library import LIBRARY, library_on
from gemini.schedule.link_costs import Links
from gemini.schedule.placements import PLACEMENTS, placement
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import simulate
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.stage_costs import StageCost

_MOST_BLOCKS = 16_000  # of a plan that is simulated whole
_MILLI = 1e3  # plans are in ms
_LEAST_SPAN = 1e-9  # ms; a block needs a time above zero


@dataclass(frozen=True)
class PipelineRun:
    """Seconds of the micro-batches, and per device: busy seconds and bytes of activations at the peak."""

    seconds: float
    busy: tuple[float, ...]
    peaks: tuple[float, ...]
    plan: SchedPlan | None = field(default=None, repr=False, compare=False)

    @property
    def bubble(self) -> float:
        """Idle seconds of the device that works longest."""
        return max(0.0, self.seconds - max(self.busy))


def check_schedule(config: ParallelConfig) -> None:
    """Raise where the schedule does not exist for these degrees."""
    if config.plan_name not in LIBRARY:
        fault = Fault(f"unknown schedule {config.plan_name!r}", remedy(config.plan_name, [*LIBRARY, "auto"]))
        raise ConfigError([fault], "parallel configuration")
    if found := schedule_faults(config):
        raise ConfigError([Fault(found[0], "change that degree, or take another schedule")], "parallel configuration")


def schedule_faults(config: ParallelConfig) -> list[str]:
    """Return why a schedule of the library does not exist for these degrees; empty where it does."""
    name = config.plan_name
    entry = LIBRARY[name]
    needed = entry.chunks or (config.chunks if PLACEMENTS[entry.placement].chunked else 1)
    if config.chunks != needed:
        return [f"chunks = {config.chunks} with {name}, which has {needed}"]
    if not entry.admits(config.pipeline, config.micro_batches, config.chunks):
        what = f"{name} for pipeline {config.pipeline}, {config.micro_batches} micro-batches, {config.chunks} chunks"
        return [f"{what}: it needs {entry.admissible}"]
    return []


def run_pipeline(config: ParallelConfig, stages: Sequence[StageCost], hop: float) -> PipelineRun:
    """Simulate the schedule; `hop` is the time of a transfer between stages."""
    count = config.micro_batches
    if config.pipeline == 1:
        only = stages[0]
        return PipelineRun(count * only.total, (count * only.total,), (only.activations,))
    check_schedule(config)
    shape = _placement(config, stages, hop)
    blocks = len(shape)
    if count * blocks <= _MOST_BLOCKS:
        return _run(config, shape, count)
    # Two parts of the steady state, whole groups of micro-batches apart.
    group = config.pipeline
    first = max(2 * group, _MOST_BLOCKS // (2 * blocks) // group * group)
    near, far = _run(config, shape, first), _run(config, shape, first + group)
    more = (count - first - group) / group
    period = far.seconds - near.seconds
    busy = tuple(late + more * (late - early) for early, late in zip(near.busy, far.busy))
    return PipelineRun(far.seconds + more * period, busy, far.peaks, far.plan)


def _placement(config: ParallelConfig, stages: Sequence[StageCost], hop: float) -> SchedPlan:
    entry = LIBRARY[config.plan_name]
    count = 2 * config.pipeline if entry.placement == "xshape" else config.stages
    # Both replicas of a bidirectional schedule have all stages.
    held = [stages[index % len(stages)] for index in range(count)]
    shape = placement(
        entry.placement,
        config.pipeline,
        split=entry.split,
        chunks=config.chunks if PLACEMENTS[entry.placement].chunked else None,
        forward=[_span(stage.forward) for stage in held],
        backward=[_span(stage.backward) for stage in held],
        input_gradient=[_span(stage.input_gradient) for stage in held],
        weight_gradient=[_span(stage.weight_gradient) for stage in held],
        memory=[max(stage.activations, 1.0) for stage in held],
    )
    shape.links = Links(latency=hop * _MILLI)
    return shape


def _run(config: ParallelConfig, shape: SchedPlan, count: int) -> PipelineRun:
    plan = library_on(config.plan_name, shape, count)
    ran = simulate(plan).require()
    busy = tuple(ran.makespan * (1 - idle) / _MILLI for idle in ran.idle)
    return PipelineRun(ran.makespan / _MILLI, busy, tuple(map(float, ran.peak_memory)), plan)


def _span(seconds: float) -> float:
    return max(seconds * _MILLI, _LEAST_SPAN)


# ── closed form ──────────────────────────────────────────────────────────────────────────────────────────────────────
def estimate_pipeline(config: ParallelConfig, stages: Sequence[StageCost], hop: float) -> PipelineRun:
    """Return time and peaks by closed form, as a search over thousands of configurations needs them."""
    ranks, chunks, count = config.pipeline, config.chunks, config.micro_batches
    if ranks == 1:
        return run_pipeline(config, stages, hop)
    devices = [stages[device::ranks] for device in range(ranks)]
    loads = [sum(stage.total for stage in held) for held in devices]
    slowest = max(loads)
    forward = max(sum(stage.forward for stage in held) for held in devices)
    weight = min(sum(stage.weight_gradient for stage in held) for held in devices)
    mean = sum(loads) / ranks
    name = config.plan_name
    if name == "zb_h1":
        fill = (ranks - 1) * max(0.0, mean - 2 * weight)
    elif name == "zb_h2":
        fill = (ranks - 1) * forward
    elif name in ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"):
        fill = (ranks - 1) * mean / chunks
    else:
        fill = (ranks - 1) * mean
    seconds = count * slowest + fill + 2 * (ranks * chunks - 1) * hop + (count * hop if chunks == 1 else 0.0)
    return PipelineRun(seconds, tuple(count * load for load in loads), _peaks(config, devices))


def _peaks(config: ParallelConfig, devices: Sequence[Sequence[StageCost]]) -> tuple[float, ...]:
    ranks, chunks, count = config.pipeline, config.chunks, config.micro_batches
    peaks = []
    for device, held in enumerate(devices):
        kept = max(stage.activations for stage in held)
        if config.plan_name in ("gpipe", "looped_bfs"):
            flight = float(count * chunks)
        elif chunks == 1:
            more = 2 * (ranks - device) - 1 if config.plan_name == "zb_h2" else ranks
            flight = min(count, more if config.plan_name.startswith("zb") else ranks - device)
        else:
            flight = min(count * chunks, (chunks - 1) * ranks + 2 * (ranks - 1 - device) + 1)
        peaks.append(kept * flight)
    return tuple(peaks)
