"""Step timeline: a predicted step for Perfetto, with one representative per group of equal ranks, or all.

    replica 0            stage 0   ▇▇F▇▇ ▇▇F▇▇ ░░░ ▇▇▇B▇▇▇ …  gradients  optimizer
                         stage 1         ▇▇F▇▇ ▇▇F▇▇ …

Ranks with the same stage do the same at the same time; the name of a track lists how many there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemini.atomic_files import write_whole
from gemini.errors import ConfigError, Fault
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.step_simulation import StepResult

_MICRO = 1e6
_MOST_EVENTS = 400_000
Event = dict[str, Any]


def save_timeline(result: StepResult, path: str | Path, *, all_ranks: bool = False) -> Path:
    """Write the trace; with `all_ranks` every rank has its track."""
    events = list(_events(result, all_ranks=all_ranks))
    write_whole(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return Path(path)


def _events(result: StepResult, *, all_ranks: bool) -> Iterator[Event]:
    config = result.config
    slices = [list(_stage_slices(result, stage)) for stage in range(config.pipeline)]
    tracks = config.devices if all_ranks else config.pipeline
    per_stage = config.devices // config.pipeline
    if sum(map(len, slices)) * (per_stage if all_ranks else 1) > _MOST_EVENTS:
        what = f"a trace of {config.devices} ranks has more than {_MOST_EVENTS:,} events"
        raise ConfigError([Fault(what, "leave --all-ranks out: equal ranks then share a track")], "timeline")
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{result.model}: {config.label()}"}}
    for track in range(tracks):
        stage = stage_of(config, track) if all_ranks else track
        name = f"rank {track}, stage {stage}" if all_ranks else f"stage {stage} ({per_stage} ranks)"
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
        for event in slices[stage]:
            yield {**event, "tid": track}


def stage_of(config: ParallelConfig, rank: int) -> int:
    """Return the place of a rank in its pipeline."""
    return rank // config.stride("pipeline") % config.pipeline


def _stage_slices(result: StepResult, stage: int) -> Iterator[Event]:
    plan, end = result.run.plan, result.run.seconds
    if plan is None:
        one = result.stages[0]
        for micro in range(result.config.micro_batches):
            begin = micro * one.total
            yield _slice(f"F{micro}", "forward", begin, one.forward)
            yield _slice(f"B{micro}", "backward", begin + one.forward, one.backward)
    else:
        for block in plan.device_blocks(stage):
            yield _slice(str(block), block.btype, plan.step(block) / 1e3, block.span / 1e3)
        if plan.nsteps / 1e3 < end * (1 - 1e-9):
            shown = plan.nsteps / 1e3
            left = result.config.micro_batches - plan.nmicros
            yield _slice(f"{left} more micro-batches in the same order", "repeated", shown, end - shown)
    for name in ("gradients", "optimizer"):
        if result.parts[name]:
            yield _slice(name, name, end, result.parts[name])
            end += result.parts[name]


def _slice(name: str, kind: str, begin: float, seconds: float) -> Event:
    return {"ph": "X", "pid": 1, "name": name, "cat": kind, "ts": begin * _MICRO, "dur": seconds * _MICRO}
