"""Looped BFS: several chunks per device, each for all micro-batches before the next (breadth first).

Two devices, two chunks, three micro-batches; backward in reverse order:

    dev 0   0F0 0F1 0F2 2F0 2F1 2F2   .   .   . 2B2 ─── 2B1 ─── 2B0 ─── 0B2 ─── …
    dev 1     . 1F0 1F1 1F2 3F0 3F1 3F2 3B2 ─── 3B1 ─── 3B0 ─── 1B2 ─── …

Like GPipe it holds everything; like all looped schedules its bubble is that of one chunk. Chunk by chunk also means
that a chunk's weights are gathered, and its gradients reduced, once per step.
"""

from __future__ import annotations

from gemini.schedule.block import BACKWARD, FORWARD, Action
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry, chunks_of
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Forwards chunk by chunk; backwards with chunks and micro-batches in reverse."""
    ndevs, chunks = placement.ndevs, chunks_of(placement)
    rows = []
    for dev in range(ndevs):
        stages = [lap * ndevs + dev for lap in range(chunks)]
        forwards = [Action(stage, FORWARD, mid) for stage in stages for mid in range(nmicros)]
        rows.append([*forwards, *(Action(action.stage, BACKWARD, action.mid) for action in reversed(forwards))])
    return rows


LOOPED_BFS = ScheduleEntry(
    "looped_bfs",
    "chunk by chunk for all micro-batches, all forwards first",
    "interleaved",
    orders,
    admits=lambda _devices, _micros, chunks: chunks >= 2,
    admissible="2 chunks per device or more (with one chunk it is gpipe), any number of devices and micro-batches",
)
