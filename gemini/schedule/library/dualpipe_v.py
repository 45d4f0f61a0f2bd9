"""DualPipeV: one half of DeepSeek's DualPipe, folded into a V.

DualPipe feeds micro-batches from both ends of the pipeline and keeps two copies of the model. Cut in half and folded,
the downward and the upward pass are two chunks of one device (stages d and 2P − 1 − d) and one copy is enough. Every
forward of one chunk is paired with a backward of the other, so that on real hardware the communication of one overlaps
the computation of the other; a plan, in which a device runs one block at a time, has them in sequence.

    F0 …  │ F0 F1 …  │ I1 W1 F1 …  │ F0·B1  F1·B0 …  │ B1 F1·B0 …  │ B1 B0 … I1 I0 …  │ W I0 …  │ W …
    fill    both       zero bubble    steady             drain       half of them split   weight gradients last

A full backward (B) is an input gradient directly followed by its weight gradient. Needs N ≥ 2P.
"""

from __future__ import annotations

from gemini.schedule.library.order_program import run_program
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """The eight steps of DualPipeV."""
    ndevs = placement.ndevs
    rows = []
    for dev in range(ndevs):
        below = ndevs - 1 - dev
        last = " ".join(f"{'B' if index <= dev else 'I'}{1 - index % 2}" for index in range(2 * dev + 2))
        program = [
            (2 * below, "F0"),
            (dev + 1, "F0 F1"),
            (below, "I1 w F1"),
            (nmicros - 2 * ndevs + dev + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (1, last),
            (below, "w I0"),
            (dev + 1, "w"),
        ]
        rows.append(run_program(program, [dev, 2 * ndevs - 1 - dev], nmicros, split=True))
    return rows


DUALPIPE_V = ScheduleEntry(
    "dualpipe_v",
    "DeepSeek's DualPipe cut in half: each forward paired with the other chunk's backward",
    "vchunks",
    orders,
    split=True,
    chunks=2,
    admits=lambda ndevs, nmicros, _chunks: nmicros >= 2 * ndevs,
    admissible="at least twice as many micro-batches as devices",
)
