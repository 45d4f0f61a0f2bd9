"""Report of `gemini schedule`: the plan and its metrics, as text or JSON."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemini.schedule.block import Number
from gemini.schedule.phases import find_phases
from gemini.schedule.plan_metrics import Figures, compare, measure
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.text_grid import format_time

PLAIN_WIDTH = 120
MOST_PEAKS_LISTED = 8


def as_text(plan: SchedPlan, written: Mapping[str, Path], with_library: bool) -> str:
    """Return the grid, the figures and the files, for a terminal."""
    figures = measure(plan)
    lines = [repr(plan), "", _phases_line(plan)]
    lines.append(f"makespan {format_time(figures.makespan)}, bubble rate {figures.bubble:.1%}")
    lines.append(f"peak memory by device: {' '.join(format_time(peak) for peak in figures.peaks)}")
    if with_library:
        lines += ["", comparison_table(compare(plan), plan.memory)]
    lines += [f"wrote {path}" for path in written.values()]
    return "\n".join(lines)


def as_json(plan: SchedPlan, written: Mapping[str, Path], with_library: bool) -> str:
    """Return the same as a JSON document."""
    figures, phases, proof = measure(plan), find_phases(plan), plan.proof
    document: dict[str, object] = {
        "ndevs": plan.ndevs,
        "nmicros": plan.nmicros,
        "memory": plan.memory and [limit if math.isfinite(limit) else None for limit in plan.memory],
        **_figures(figures),
        "warm_up": phases and phases.begin,
        "repetend": phases and {"length": phases.length, "nmicros": phases.nmicros, "times": phases.kernels},
        "cool_down": phases and plan.nsteps - phases.end,
        "lower_bound": proof and proof.lower_bound,
        "makespan_lower_bound": proof and proof.makespan_bound,
        "optimal": proof and proof.optimal,
        "gap": proof and proof.gap,
        "method": proof and proof.method,
        "seconds": proof and proof.seconds,
        "notes": proof and proof.notes,
        "files": {name: str(path) for name, path in written.items()},
    }
    if with_library:
        document["compare"] = [{"name": row.name, **_figures(row)} for row in compare(plan)]
    return json.dumps(document, indent=1, allow_nan=False)


def _figures(row: Figures) -> dict[str, object]:
    return {"period": row.period, "bubble_rate": row.bubble, "makespan": row.makespan, "peak_memory": row.peaks}


def _phases_line(plan: SchedPlan) -> str:
    phases = find_phases(plan)
    if phases is None:
        return f"no steady state within {plan.nmicros} micro-batches"
    of = f" of {phases.nmicros} micro-batches" if phases.nmicros > 1 else ""
    return (
        f"warm-up {format_time(phases.begin)}, repetend {format_time(phases.length)}{of} × {phases.kernels}, "
        f"cool-down {format_time(plan.nsteps - phases.end)}"
    )


# ---------------------------------------------------------------- the comparison


def comparison_table(rows: Sequence[Figures], limits: Sequence[Number] | None) -> str:
    """Return a table of plans; peaks above the memory limit are marked with `!`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("schedule")
    for heading in ("period", "bubble rate", "makespan", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("of each device", no_wrap=True)
    too_large = [_exceeds(row, limits) for row in rows]
    for index, (row, over) in enumerate(zip(rows, too_large)):
        table.add_row(
            row.name,
            "–" if row.period is None else format_time(row.period),
            f"{row.bubble:.1%}",
            format_time(row.makespan),
            format_time(row.peak) + ("!" if over else ""),
            _peaks(row.peaks),
            style="bold" if index == 0 else None,
        )
    colour = sys.stdout.isatty()
    text = io.StringIO()
    console = Console(file=text, width=None if colour else PLAIN_WIDTH, force_terminal=colour, highlight=False)
    console.print(table)
    if any(too_large):
        console.print(" ! more than the memory limit", style="dim")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def _exceeds(row: Figures, limits: Sequence[Number] | None) -> bool:
    return limits is not None and any(peak > limit * (1 + 1e-9) for peak, limit in zip(row.peaks, limits))


def _peaks(peaks: Sequence[Number]) -> str:
    if len(peaks) > MOST_PEAKS_LISTED:
        return f"{format_time(min(peaks))} … {format_time(max(peaks))}"
    return " ".join(format_time(peak) for peak in peaks)
