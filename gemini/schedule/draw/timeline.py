"""What a picture of a schedule shows, before any file format: rows, bars, idle gaps, memory curves and phases."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini.schedule.block import Block, Number
from gemini.schedule.compare import Figures, measure
from gemini.schedule.draw.palette import OTHER, SHADES
from gemini.schedule.grid import format_time
from gemini.schedule.phases import Phases, find_phases
from gemini.schedule.schedplan import SchedPlan


@dataclass(frozen=True)
class Row:
    """One device: its blocks in order, its idle stretches, what it holds from which time on, and its limit."""

    blocks: tuple[Block, ...]
    idle: tuple[tuple[Number, Number], ...]
    memory: tuple[tuple[Number, Number], ...]
    peak: Number
    limit: Number | None


@dataclass(frozen=True)
class Timeline:
    """A schedule laid out for drawing."""

    plan: SchedPlan
    title: str
    end: Number
    rows: tuple[Row, ...]
    phases: Phases | None
    figures: Figures
    shows_memory: bool

    @property
    def memory_range(self) -> tuple[Number, Number]:
        """The lowest and highest value that the memory curves and limits of all rows reach."""
        values: list[Number] = [0]
        for row in self.rows:
            values += [held for _, held in row.memory]
            values += [row.limit] if row.limit is not None else []
        return min(values), max(values)

    @property
    def headline(self) -> list[tuple[str, str]]:
        """The figures that stand over the picture, as (name, value)."""
        facts = [] if self.figures.period is None else [("period", format_time(self.figures.period))]
        facts += [("bubble rate", f"{self.figures.bubble:.1%}"), ("makespan", format_time(self.figures.makespan))]
        if self.shows_memory:
            facts.append(("peak memory", format_time(self.figures.peak)))
        if self.plan.proof is not None:
            proof = self.plan.proof
            facts.append(("proof", "optimal" if proof.optimal else f"within {proof.gap:.2%} of the bound"))
        return facts

    @property
    def sections(self) -> list[tuple[str, Number, Number]]:
        """Warm-up, steady state and cool-down as (name, begin, end), those that last."""
        if self.phases is None:
            return []
        begin, end = self.phases.begin, self.phases.end
        sections: list[tuple[str, Number, Number]] = [
            ("warm-up", 0, begin),
            ("steady state", begin, end),
            ("cool-down", end, self.end),
        ]
        return [section for section in sections if section[2] > section[1]]


def timeline(plan: SchedPlan, title: str | None = None) -> Timeline:
    """Lay out `plan`; the default title says how many devices and micro-batches it has."""
    limits = [limit if math.isfinite(limit) else None for limit in plan.memory or (math.inf,) * plan.ndevs]
    end = plan.nsteps
    rows = tuple(_row(plan, device, end, limits[device]) for device in range(plan.ndevs))
    shows_memory = any(row.limit is not None or any(held for _, held in row.memory) for row in rows)
    name = title if title is not None else f"{_count(plan.ndevs, 'device')}, {_count(plan.nmicros, 'micro-batch')}"
    return Timeline(plan, name, end, rows, find_phases(plan), measure(plan), shows_memory)


def _row(plan: SchedPlan, device: int, end: Number, limit: Number | None) -> Row:
    blocks = plan.device_blocks(device)
    idle: list[tuple[Number, Number]] = []
    memory: list[tuple[Number, Number]] = [(0, 0)]
    free: Number = 0
    for block in blocks:
        start = plan.step(block)
        if start > free:
            idle.append((free, start))
        free = max(free, start + block.span)
    if end > free:
        idle.append((free, end))
    for point in plan.memory_curve(device):
        if point[1] != memory[-1][1]:
            memory.append(point)
    return Row(tuple(blocks), tuple(idle), tuple(memory), max(value for _, value in memory), limit)


def shade(block: Block) -> int:
    """Which shade of its micro-batch's colour a block has."""
    return SHADES.get(block.btype, OTHER)


def _count(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
