"""Timeline of a schedule, independent of a file format: rows, bars, idle gaps, memory curves and phases."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini.schedule.block import Block, Number
from gemini.schedule.draw.palette import OTHER, SHADES
from gemini.schedule.phases import Phases, find_phases
from gemini.schedule.plan_metrics import Figures, measure
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.text_grid import format_time


@dataclass(frozen=True)
class Row:
    """One device: its blocks in order, its idle intervals, its memory over time, and its limit."""

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
    units: tuple[str, str] = ("", "")  # of time and of memory
    row_name: str = "device"
    facts: tuple[tuple[str, str], ...] | None = None  # shown above the picture, if not the default

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
        """The figures above the picture, as (name, value)."""
        if self.facts is not None:
            return list(self.facts)
        figures, proof = self.figures, self.plan.proof
        facts = []
        if figures.period is not None:
            known = proof is not None and math.isclose(proof.period, figures.period)
            bound = proof.lower_bound if known and proof is not None else None
            facts.append(("period", _with_bound(figures.period, bound)))
        facts.append(("bubble rate", f"{figures.bubble:.1%}"))
        known = proof is not None and proof.makespan == self.end
        bound = proof.makespan_bound if known and proof is not None else None
        facts.append(("makespan", _with_bound(figures.makespan, bound)))
        if self.shows_memory:
            facts.append(("peak memory", format_time(figures.peak)))
        return facts

    def row_label(self, row: int) -> str:
        """The label beside a row."""
        return f"{self.row_name} {row}"

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
    """Lay out `plan`; the default title shows the number of devices and micro-batches."""
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


def _with_bound(value: Number, bound: Number | None) -> str:
    """Format a figure and its lower bound."""
    if bound is None:
        return format_time(value)
    optimal = value <= bound * (1 + 1e-9)
    return f"{format_time(value)} ({'optimal' if optimal else f'bound {format_time(bound)}'})"


def shade(block: Block) -> int:
    """Which shade of its micro-batch's colour a block has."""
    return SHADES.get(block.btype, OTHER)


def _count(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
