"""Metrics of a plan, for comparison with other schedules."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.errors import ScheduleError
from gemini.schedule.block import Number
from gemini.schedule.phases import find_phases
from gemini.schedule.schedplan import SchedPlan


@dataclass(frozen=True)
class Figures:
    """The figures of one plan.

    `period` is the time per micro-batch in the steady state, `None` where the plan never reaches one; `bubble` is the
    idle share of all devices from the start of the plan to its end; `peaks` is the most memory each device holds.
    """

    name: str
    period: float | None
    bubble: float
    makespan: Number
    peaks: tuple[Number, ...]

    @property
    def peak(self) -> Number:
        """The most memory that any device holds."""
        return max(self.peaks)


def measure(plan: SchedPlan, name: str = "") -> Figures:
    """The figures of `plan`, read off its blocks."""
    phases = find_phases(plan)
    if phases is not None:
        period: float | None = phases.period
    else:
        period = plan.pattern.period if plan.pattern is not None else None
    peaks = tuple(plan.peak_memory(device) for device in range(plan.ndevs))
    return Figures(name, period, bubble_rate(plan), plan.nsteps, peaks)


def compare(plan: SchedPlan, name: str = "composed") -> list[Figures]:
    """The figures of `plan`, then of every known schedule that runs on its placement for as many micro-batches."""
    from gemini.schedule.library import library_for, library_on

    rows = [measure(plan, name)]
    placement = plan.placement
    if placement is None:
        raise ScheduleError(
            "this plan has no placement, so no other schedule can be compared with it\n"
            "    → compose it, or set plan.placement to the blocks of one micro-batch"
        )
    for known in library_for(placement, plan.nmicros):
        rows.append(measure(library_on(known, placement, plan.nmicros), known))
    return rows


def bubble_rate(plan: SchedPlan) -> float:
    """The idle share of all devices over the makespan: 0 is none, 1 is all."""
    if not plan.nsteps:
        return 0.0
    busy = sum(block.span * len(plan.device(block)) for block in plan)
    return 1 - busy / (plan.ndevs * plan.nsteps)
