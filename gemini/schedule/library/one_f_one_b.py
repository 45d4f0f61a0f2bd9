"""1F1B: after a warm-up, one forward and one backward in turn.

    dev 0   F0 F1 F2 F3  .  .  .  .  .  . B0 ── F4 B1 ── F5 …
    dev 1    . F0 F1 F2  .  .  .  . B0 ── F3 B1 ── F4 B2 ──
    dev 2    .  . F0 F1  .  . B0 ── F2 B1 ── F3 B2 ──
    dev 3    .  .  . F0 B0 ── F1 B1 ── F2 B2 ──

As fast as GPipe, (N + P − 1)(F + B), with the activations of P − d micro-batches on device d instead of all N.
"""

from __future__ import annotations

from gemini.schedule.library.order_program import run_program
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Device d warms up with P − 1 − d forwards."""
    ndevs = placement.ndevs
    rows = []
    for dev in range(ndevs):
        warm = min(ndevs - 1 - dev, nmicros)
        rows.append(run_program([(warm, "F0"), (nmicros - warm, "F0 B0"), (warm, "B0")], [dev], nmicros, split=False))
    return rows


ONE_F_ONE_B = ScheduleEntry("1f1b", "one forward, one backward in turn, P − d micro-batches live", "vshape", orders)
