"""Shared processors: a schedule whose devices are processes that take turns on fewer processors.

2 processors, 4 workers       worker 0  ▓▓▓▓░░▓▓        a block runs at full speed while at most two run,
                              worker 1  ░▓▓▓▓▓▓░        else each at processors / running of it
"""

from __future__ import annotations

from dataclasses import replace

from gemini.schedule.block import Block
from gemini.schedule.schedplan import SchedPlan
from gemini.tune.pipeline_run import PipelineRun

_MILLI = 1e3  # plans are in ms


def share_processors(run: PipelineRun, processors: int, ranks: int) -> PipelineRun:
    """Return a run whose every device is `ranks` processes, on that many processors of one host; 0: no sharing."""
    capacity = processors / ranks if processors else float("inf")  # blocks that run at full speed
    if capacity >= len(run.busy):
        return run
    least = sum(run.busy) / capacity
    if run.plan is None:
        return replace(run, seconds=max(run.seconds, least))
    whole = run.seconds * _MILLI / max(1e-12, _makespan(run.plan, float("inf")))  # a plan may stand for a longer one
    return replace(run, seconds=max(least, _makespan(run.plan, capacity) * whole / _MILLI))


def _makespan(plan: SchedPlan, capacity: float) -> float:
    """Return the time of a plan in its order, with `capacity` blocks at full speed."""
    rows: list[list[Block]] = [[] for _ in range(plan.ndevs)]
    for block in plan.all_blocks():
        for device in plan.device(block):
            rows[device].append(block)
    ended: dict[Block, float] = {}
    left: dict[Block, float] = {}
    now = 0.0
    while any(rows):
        waiting = []
        for row in rows:
            if row and row[0] not in left:
                ready = _ready_time(plan, row[0], rows, ended)
                if ready <= now:
                    left[row[0]] = float(row[0].span)
                elif ready < float("inf"):
                    waiting.append(ready)
        rate = min(1.0, capacity / len(left)) if left else 1.0
        ends = now + min(left.values()) / rate if left else float("inf")
        then = min([ends, *waiting])
        done = (then - now) * rate
        now = then
        left = {block: span - done for block, span in left.items()}
        for block in [block for block, span in left.items() if span <= 1e-9]:
            del left[block]
            ended[block] = now
            for row in rows:
                if row and row[0] is block:
                    row.pop(0)
    return now


def _ready_time(plan: SchedPlan, block: Block, rows: list[list[Block]], ended: dict[Block, float]) -> float:
    """Return when the inputs of a block are there; infinity where that is not known yet."""
    devices = plan.device(block)
    if any(rows[device][0] is not block for device in devices):
        return float("inf")
    before = [one for one in block.before if one in plan]
    if any(one not in ended for one in before):
        return float("inf")
    delays = (
        ended[one] + float(plan.links.delay(plan.device(one), devices, block.nbytes.get(one, 0))) for one in before
    )
    return max(delays, default=0.0)
