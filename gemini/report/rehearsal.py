"""Rehearsal: what a step is expected to take once some have run.

A plan is made from a profile of one process, with what probes say of workers beside each other. What actions take in
the workers, in their caches, on their cores, is known after a few steps. The same orders with those times say how long
the next step takes: where that is right and the plan was not, the profile was wrong; where both are, workers waited for
something that the plan does not know of.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gemini.report.step_trace import StepTrace
from gemini.schedule.block import Block, Number
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import Simulation, simulate


def rehearsed(steps: Sequence[StepTrace]) -> StepTrace:
    """The last of some steps of one plan, with what those before it say about it; at least one is before it."""
    *before, last = steps
    again = respanned(last.planned, [one.measured for one in before])
    around = statistics.median(one.step_ms - float(one.measured.nsteps) for one in before)
    return replace(last, rehearsed_ms=float(again.makespan) + around)


def respanned(plan: SchedPlan, ran: Iterable[SchedPlan]) -> Simulation:
    """The same orders, each action as long as those of its stage and kind took (median)."""
    took: dict[tuple[int | None, str], list[Number]] = {}
    for one in ran:
        for block in one:
            took.setdefault((block.stage, block.btype), []).append(block.span)
    spans = {key: statistics.median(found) for key, found in took.items()}

    def span(block: Block) -> Number:
        return spans.get((block.stage, block.btype), block.span)

    return simulate(plan, spans=span)
