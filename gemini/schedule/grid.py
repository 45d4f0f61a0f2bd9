"""A plan as text: devices as rows, time as columns, blocks by their short names.

    time      0   1   2   3   4   5
    dev 0   0F0 0F1   .   . 0B0 ───      ─── the block goes on
    dev 1     . 1F0 1B0 ─── 1F1 1B1      .   the device is idle
                                         !0F1   a marked block;  0F0+0F1   two blocks at once

Where all times are multiples of one unit a column is that unit; otherwise a column begins at every event. What
does not fit is left out and said so.
"""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from gemini.schedule.block import Block, Number
from gemini.schedule.schedplan import SchedPlan

IDLE = "."
MARK = "!"
GOES_ON = "───"
_SAME = 1e-9  # relative distance below which two times are one event
_MAX_UNITS_AN_EVENT = 4  # columns of equal width pay off up to this many columns an event
_MAX_DENOMINATOR = 1000


def grid(
    plan: SchedPlan,
    marks: Collection[Block] = (),
    *,
    width: int | None = None,
    max_devices: int = 64,
) -> str:
    """The plan as a device × time table, at most `width` characters wide (default: the terminal's).

    Blocks in `marks` carry a `!`, and the part of the plan that is shown begins at the first of them.
    """
    marked = {block for block in marks if block in plan}
    if not len(plan):
        return f"{_title(plan)}\n(no blocks)"
    columns = _columns(plan)
    rows = _shown_devices(plan, marked, max_devices)
    cells = _cells(plan, columns, rows, marked)
    labels = ["time", *(f"dev {dev}" for dev in rows)]
    margin = max(map(len, labels))
    room = (width or max(80, shutil.get_terminal_size((160, 24)).columns)) - margin - 4
    first, last, cell_width = _window(plan, columns, cells, marked, room)
    table = [[format_time(at) for at in columns[first:last]]]
    table.extend([row.get(index, IDLE) for index in range(first, last)] for row in cells)
    cut = (first > 0, last < len(columns))
    lines = [_title(plan)]
    lines.extend(_line(label.ljust(margin), texts, cell_width, cut) for label, texts in zip(labels, table))
    lines.extend(_left_out(plan, columns, first, last, len(rows)))
    if plan.proof is not None:
        lines.append(str(plan.proof))
    return "\n".join(lines)


def format_time(value: Number) -> str:
    """A time as short as it can be without misleading: integers as they are, reals to five digits or whole."""
    return f"{value:.5g}" if isinstance(value, float) and abs(value) < 1e5 else f"{value:.0f}"


def _title(plan: SchedPlan) -> str:
    counts = [_count(plan.ndevs, "device"), _count(plan.nmicros, "micro-batch"), _count(len(plan), "block")]
    return f"{', '.join(counts)}, makespan {format_time(plan.nsteps)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


# -------------------------------------------------------------------- columns


def _columns(plan: SchedPlan) -> list[Number]:
    """Where columns begin: multiples of the largest common unit of all times, or every event."""
    times = _events(plan)
    end = times[-1]
    exact = [Fraction(time).limit_denominator(_MAX_DENOMINATOR) for time in times]
    if all(abs(float(fraction) - time) <= _SAME * end for fraction, time in zip(exact, times)):
        scale = math.lcm(*(fraction.denominator for fraction in exact))
        unit = Fraction(math.gcd(*(int(fraction * scale) for fraction in exact)), scale)
        count = int(exact[-1] / unit)
        if count <= _MAX_UNITS_AN_EVENT * len(times):
            return [_plain(index * unit) for index in range(count)]
    return times[:-1]


def _events(plan: SchedPlan) -> list[Number]:
    """All starts and ends, and 0, those that differ only by rounding merged."""
    times: set[Number] = {0}
    for block in plan:
        times.update((plan.step(block), plan.step(block) + block.span))
    events: list[Number] = []
    slack = _SAME * max(times)
    for time in sorted(times):
        if not events or time - events[-1] > slack:
            events.append(time)
    return events


def _plain(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else float(value)


# ---------------------------------------------------------------------- cells


@dataclass
class _Cell:
    """What one device does in one column."""

    names: list[str]
    starts: bool

    def text(self) -> str:
        return "+".join(self.names) if self.starts or len(self.names) > 1 else GOES_ON


def _cells(plan: SchedPlan, columns: list[Number], rows: list[int], marked: set[Block]) -> list[dict[int, str]]:
    """Text of every busy cell, a row a device, by column."""
    slack = _SAME * plan.nsteps
    table: dict[int, dict[int, _Cell]] = {dev: {} for dev in rows}
    for block in plan.all_blocks():
        start = plan.step(block)
        begin = bisect_left(columns, start - slack)
        end = max(begin + 1, bisect_left(columns, start + block.span - slack))
        name = f"{MARK}{block}" if block in marked else str(block)
        for dev in plan.device(block):
            for column in range(begin, end) if dev in table else ():
                cell = table[dev].setdefault(column, _Cell([], False))
                cell.names.append(name)
                cell.starts |= column == begin
    return [{column: cell.text() for column, cell in table[dev].items()} for dev in rows]


def _shown_devices(plan: SchedPlan, marked: set[Block], limit: int) -> list[int]:
    """The first devices, but those with marked blocks before any other."""
    faulty = sorted({dev for block in marked for dev in plan.device(block)})
    order = faulty + [dev for dev in range(plan.ndevs) if dev not in set(faulty)]
    return sorted(order[:limit])


def _window(
    plan: SchedPlan, columns: list[Number], cells: list[dict[int, str]], marked: set[Block], room: int
) -> tuple[int, int, int]:
    """First and last column shown and how wide a column is."""
    first = 0
    slack = _SAME * plan.nsteps
    widest = max((len(text) for row in cells for text in row.values()), default=1)
    widest = max(widest, *(len(format_time(at)) for at in columns)) + 1
    if marked and widest * len(columns) > room:
        earliest = bisect_left(columns, min(plan.step(block) for block in marked) - slack)
        fits = max(1, room // widest)
        context = min(2, fits - 1)
        first = max(0, min(earliest - context, len(columns) - fits))
    last = min(len(columns), first + max(1, room // widest))
    return first, last, widest


def _line(label: str, cells: list[str], width: int, cut: tuple[bool, bool]) -> str:
    text = label + (" …" if cut[0] else "  ") + "".join(f"{cell:>{width}}" for cell in cells)
    return text.rstrip() + (" …" if cut[1] else "")


def _left_out(plan: SchedPlan, columns: list[Number], first: int, last: int, devices: int) -> list[str]:
    notes = []
    if first:
        notes.append(f"… {_count(first, 'earlier column')} left out, from time 0")
    if last < len(columns):
        notes.append(f"… {_count(len(columns) - last, 'later column')} left out, to time {format_time(plan.nsteps)}")
    if devices < plan.ndevs:
        notes.append(f"… {_count(plan.ndevs - devices, 'device')} left out")
    return notes
