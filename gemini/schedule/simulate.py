"""Simulation: execution of a plan with different times than planned.

Devices act as the runtime does: each runs its blocks in the planned order and starts one as soon as all its
devices are free and its inputs have arrived. Spans, links and jitter may differ from the plan and determine the
times; orders that cannot be executed end in a deadlock, which the report explains:

    dev 0   1B0 …      waits for 1F0
    dev 1   1F0 …      waits for 0F0, which device 0 has after 1B0
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from gemini.errors import InvalidPlanError, PlacementError
from gemini.schedule.block import Block, Number, canonical_type
from gemini.schedule.link_costs import Links
from gemini.schedule.schedplan import SchedPlan, connect
from gemini.schedule.text_grid import format_time

Spans = Callable[[Block], Number] | Mapping[int, Number] | Mapping[str, Number]


@dataclass(frozen=True)
class Wait:
    """A link of a deadlock: `block` cannot start before `other` has ended, and why."""

    block: Block
    other: Block
    why: str

    def __str__(self) -> str:
        return f"{self.block} waits for {self.other}, {self.why}"


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation: the times of every block, and figures per device.

    `idle` and `peak_memory` have one entry per device. In a deadlock `deadlock` holds the blocks that wait for each
    other, each for the next and the last for the first, and the figures are those up to that point.
    """

    makespan: Number
    idle: tuple[float, ...]
    peak_memory: tuple[Number, ...]
    times: Mapping[Block, tuple[Number, Number]] = field(repr=False)
    deadlock: tuple[Wait, ...] = ()
    plan: SchedPlan | None = field(default=None, repr=False, compare=False)

    @property
    def idle_share(self) -> float:
        """The share of all device time in which nothing ran."""
        return math.fsum(self.idle) / len(self.idle)

    @property
    def completed(self) -> bool:
        """Whether every block ran."""
        return not self.deadlock

    def require(self) -> Simulation:
        """This report, or `InvalidPlanError` where the plan got stuck."""
        if self.deadlock:
            raise InvalidPlanError(str(self))
        return self

    def executed(self) -> SchedPlan:
        """The executed plan, with measured times and spans, to draw or export."""
        if self.plan is None:
            raise InvalidPlanError("this report was made without its plan\n    → simulate the plan again")
        ran = SchedPlan(self.plan.ndevs)
        ran.links, ran.placement = self.plan.links, self.plan.placement
        twins = {}
        for block, (start, end) in self.times.items():
            twins[block] = Block(block.mid, end - start, block.memory, block.btype, stage=block.stage, gid=block.gid)
            ran.add_block(twins[block], self.plan.device(block), start)
        connect(twins)
        return ran

    def __str__(self) -> str:
        lines = [f"makespan {format_time(self.makespan)}, idle {self.idle_share:.1%}"]
        lines.extend(
            f"  device {dev}: idle {idle:.1%}, peak memory {format_time(peak)}"
            for dev, (idle, peak) in enumerate(zip(self.idle, self.peak_memory))
        )
        if self.deadlock:
            lines.insert(0, f"deadlock after {len(self.times)} blocks; these wait for each other:")
            lines[1:1] = [f"  {wait}" for wait in self.deadlock]
            lines.insert(len(self.deadlock) + 1, "    → move the awaited block earlier in the order of its device")
        return "\n".join(lines)


def simulate(
    plan: SchedPlan,
    *,
    spans: Spans | None = None,
    links: Links | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Run `plan` in its order and return a report.

    `spans` overrides times: a function of the block, or a mapping by `gid` or by type; blocks not in it use their own.
    `jitter` varies every span and every transfer at random by up to that share of itself.
    """
    links = (plan.links if links is None else links).check(plan.ndevs)
    if not 0 <= jitter < 1:
        raise PlacementError(f"jitter {jitter!r}\n    → give a share from 0 up to, not including, 1")
    chance = random.Random(seed)
    order = plan.all_blocks()
    actual = {block: _span(block, spans) for block in order}
    if jitter:
        actual = {block: span * (1 + jitter * chance.uniform(-1, 1)) for block, span in actual.items()}

    def travel(prev: Block, block: Block) -> Number:
        delay = links.delay(plan.device(prev), plan.device(block), block.nbytes.get(prev, 0))
        return delay * (1 + jitter * chance.uniform(-1, 1)) if jitter and delay else delay

    rows: list[list[Block]] = [[] for _ in range(plan.ndevs)]
    for block in order:
        for dev in plan.device(block):
            rows[dev].append(block)
    # All random numbers are generated first, in plan order, so that a seed has the same effect for any times.
    delays = {(prev, block): travel(prev, block) for block in order for prev in block.before if prev in plan}
    times = _execute(plan, rows, actual, delays)
    makespan = max((end for _, end in times.values()), default=0)
    return Simulation(
        makespan,
        tuple(_idle(row, times, makespan) for row in rows),
        tuple(_peak(row, times, plan.keeps_memory) for row in rows),
        times,
        _circle(plan, rows, times) if len(times) < len(order) else (),
        plan,
    )


def _span(block: Block, spans: Spans | None) -> Number:
    if spans is None:
        return block.span
    if callable(spans):
        span = spans(block)
    else:
        given = {canonical_type(key) if isinstance(key, str) else key: value for key, value in spans.items()}
        span = given.get(block.btype, block.span)
        if block.gid is not None:
            span = given.get(block.gid, span)
    if not math.isfinite(span) or span <= 0:
        raise PlacementError(f"span {span!r} for block {block}\n    → give a time above zero")
    return span


def _execute(
    plan: SchedPlan,
    rows: list[list[Block]],
    spans: Mapping[Block, Number],
    delays: Mapping[tuple[Block, Block], Number],
) -> dict[Block, tuple[Number, Number]]:
    """Start and end of every block that ran."""
    position = [0] * plan.ndevs
    free: list[Number] = [0] * plan.ndevs
    times: dict[Block, tuple[Number, Number]] = {}
    to_look_at = [row[0] for row in rows if row]
    while to_look_at:
        block = to_look_at.pop()
        devices = plan.device(block)
        if block in times or any(prev not in times for prev in block.before):
            continue
        if any(rows[dev][position[dev]] is not block for dev in devices):
            continue
        arrivals = [times[prev][1] + delays[prev, block] for prev in block.before]
        start = max([*arrivals, *(free[dev] for dev in devices)])
        times[block] = (start, start + spans[block])
        for dev in devices:
            free[dev] = start + spans[block]
            position[dev] += 1
            if position[dev] < len(rows[dev]):
                to_look_at.append(rows[dev][position[dev]])
        to_look_at.extend(later for later in block.after if later in plan)
    return times


def _idle(row: list[Block], times: Mapping[Block, tuple[Number, Number]], makespan: Number) -> float:
    busy = math.fsum(times[block][1] - times[block][0] for block in row if block in times)
    return max(0.0, 1 - busy / makespan) if makespan else 0.0


def _peak(row: list[Block], times: Mapping[Block, tuple[Number, Number]], keeps: bool) -> Number:
    held: Number = 0
    peak: Number = 0
    for block in row:
        if block in times:
            held = held + block.memory if keeps else block.memory
            peak = max(peak, held)
    return peak


def _circle(plan: SchedPlan, rows: list[list[Block]], times: Mapping[Block, tuple[Number, Number]]) -> tuple[Wait, ...]:
    """Return a cycle of waiting blocks: follow the waits from a stuck block until one repeats."""
    ahead: dict[Block, tuple[Block, int]] = {}
    for dev, row in enumerate(rows):
        left = [block for block in row if block not in times]
        for earlier, block in pairwise(left):
            ahead.setdefault(block, (earlier, dev))
    block = next(block for row in rows for block in row if block not in times)
    path: dict[Block, Wait] = {}
    while block not in path:
        missing = [prev for prev in block.before if prev not in times]
        absent = [prev for prev in missing if prev not in plan]
        if absent:
            path[block] = Wait(block, absent[0], "which is not in the plan")
            return tuple(path.values())
        if missing:
            places = ", ".join(map(str, plan.device(missing[0])))
            path[block] = Wait(block, missing[0], f"which it depends on and which device {places} has not run yet")
        else:
            earlier, dev = ahead[block]
            path[block] = Wait(block, earlier, f"which comes before it on device {dev}")
        block = path[block].other
    waits = list(path.values())
    return tuple(waits[[wait.block for wait in waits].index(block) :])
