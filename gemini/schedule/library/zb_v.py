"""ZB-V: zero bubble on two chunks per device that run down and back up in a V.

Device d holds stages d and 2P − 1 − d, so the last device passes a micro-batch to itself and the first has the loss.
Two devices (stages 0, 3 on device 0 and 1, 2 on device 1):

    dev 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 …
    dev 1     . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 …

With F = I = W no device waits between its first block and its last, within the memory of 1F1B (2P chunks) on every
device: the chunk whose forward runs early has its backward late, and vice versa.
"""

from __future__ import annotations

from gemini.schedule.library.order_program import run_program
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Warm up until the first input gradients come back, then all six steps in turn, then the rest."""
    ndevs = placement.ndevs
    steady = max(nmicros, 2 * ndevs - 1) - ndevs
    rows = []
    for dev in range(ndevs):
        above = ndevs - dev
        program = [
            (2 * above - 1, "F0"),
            (dev, "F1 F0"),
            (above, "F1 I1 W1"),
            (steady, "F0 I0 W0 F1 I1 W1"),
            (dev, "I0 I1"),
            (above, "I0 W0"),
            (2 * dev, "W1"),
            (2 * dev, "W0"),
        ]
        rows.append(run_program(program, [dev, 2 * ndevs - 1 - dev], nmicros, split=True))
    return rows


ZB_V = ScheduleEntry(
    "zb_v", "zero bubble on V-shaped chunks in the memory of 1F1B", "vchunks", orders, split=True, chunks=2
)
