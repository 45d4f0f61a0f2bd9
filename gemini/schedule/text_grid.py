"""A plan as text: devices as rows, time as columns, blocks by their short names.

    time      0   1   2   3   4   5
    dev 0   0F0 0F1   .   . 0B0 ───      ─── the block goes on
    dev 1     . 1F0 1B0 ─── 1F1 1B1      .   the device is idle
                                         !0F1   a marked block;  0F0+0F1   two blocks at once

Where all times are multiples of one unit a column is that unit; otherwise a column begins at every event. Omitted
columns and rows are counted below the grid.
"""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from gemini.schedule.block import Block, Number
from gemini.schedule.schedplan import SchedPlan

IDLE = "."
MARK = "!"
GOES_ON = "───"
CUT = " …"
_SAME = 1e-9  # relative distance below which two times are one event
_MAX_UNITS_AN_EVENT = 4  # columns of equal width are used up to this many columns per event
_MAX_DENOMINATOR = 1000


def grid(
    plan: SchedPlan,
    marks: Collection[Block] = (),
    *,
    width: int | None = None,
    max_devices: int = 64,
) -> str:
    """The plan as a device × time table, at most `width` characters wide (default: the terminal's).

    Blocks in `marks` carry a `!`; if not everything fits, the columns around their starts are shown.
    """
    marked = {block for block in marks if block in plan}
    if not len(plan):
        return f"{_title(plan)}\n(no blocks)"
    columns = _columns(plan)
    rows = _shown_devices(plan, marked, max_devices)
    cells = _cells(plan, columns, rows, marked)
    labels = ["time", *(f"dev {dev}" for dev in rows)]
    margin = max(map(len, labels)) + 2
    room = (width or max(80, shutil.get_terminal_size((160, 24)).columns)) - margin - 2
    texts = [[format_time(at), *(row.get(index, IDLE) for row in cells)] for index, at in enumerate(columns)]
    slack = _SAME * plan.nsteps
    begins = sorted({bisect_left(columns, plan.step(block) - slack) for block in marked})
    shown, cell_width = _choose_columns([max(map(len, column)) + 1 for column in texts], begins, room)
    lines = [_title(plan)]
    for position, label in enumerate(labels):
        lines.append(_line(label.ljust(margin), [column[position] for column in texts], shown, cell_width))
    lines.extend(_left_out(plan, len(columns), shown, len(rows)))
    if plan.proof is not None:
        lines.append(str(plan.proof))
    return "\n".join(lines)


def format_time(value: Number) -> str:
    """Format a time briefly: integers unchanged, reals to five digits or as whole numbers."""
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
    """All starts and ends, and 0, merging those that differ only by rounding."""
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
    """The blocks of one device in one column."""

    names: list[str]
    starts: bool

    def text(self) -> str:
        return "+".join(self.names) if self.starts or len(self.names) > 1 else GOES_ON


def _cells(plan: SchedPlan, columns: list[Number], rows: list[int], marked: set[Block]) -> list[dict[int, str]]:
    """Text of every busy cell by column, one row per device."""
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


def _choose_columns(widths: list[int], begins: list[int], room: int) -> tuple[list[int], int]:
    """Which columns to show in `room` and how wide each: all, or those around `begins`, or the first."""
    if max(widths) * len(widths) <= room:
        return list(range(len(widths))), max(widths)
    chosen: set[int] = set()
    widest = 0
    for column in _by_interest(len(widths), begins):
        more = sorted({*chosen, column})
        gaps = sum(1 for one, two in pairwise(more) if two > one + 1)
        wider = max(widest, widths[column])
        if chosen and wider * len(more) + 2 * gaps > room:
            break
        chosen, widest = set(more), wider
    return sorted(chosen), widest


def _by_interest(count: int, begins: list[int]) -> Iterator[int]:
    """The columns in which marked blocks begin, then those next to them and so on; without marks, the first ones."""
    if not begins:
        yield from range(count)
        return
    yield from begins
    for distance in range(1, count):
        for begin in begins:
            yield from (column for column in (begin + distance, begin - distance) if 0 <= column < count)


def _line(label: str, texts: list[str], shown: list[int], width: int) -> str:
    parts = [label, CUT if shown[0] else ""]
    for column, following in zip(shown, [*shown[1:], len(texts)]):
        parts.append(f"{texts[column]:>{width}}")
        parts.append(CUT if following > column + 1 else "")
    return "".join(parts).rstrip()


def _left_out(plan: SchedPlan, columns: int, shown: list[int], devices: int) -> list[str]:
    notes = []
    if len(shown) < columns:
        notes.append(f"… {columns - len(shown)} of {columns} columns left out, to time {format_time(plan.nsteps)}")
    if devices < plan.ndevs:
        notes.append(f"… {plan.ndevs - devices} of {plan.ndevs} devices left out")
    return notes
