"""Chimera: two pipelines in opposite directions on the same devices.

There are two replicas of the model. In the first, stage s is on device s; in the second, on device P − 1 − s (here
stages P … 2P − 1). Where one pipeline has its bubble, the other has work:

    dev 0   0F0 0F1   . 7F0 7B0 7F1 7B1 0B0   . 0B1
    dev 1     . 1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1   .        P = 4, F = B, two pairs of micro-batches
    dev 2     . 5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1   .
    dev 3   4F0 4F1   . 3F0 3B0 3F1 3B1 4B0   . 4B1

A micro-batch of this plan is a *pair* as in the placement `xshape`: one through each replica. P / 2 pairs make a
unit, whose bubble is P − 2 slots instead of 2(P − 1); units follow each other without a gap when F = B. Slots: the
k-th pair of a unit enters at slot 2k, and since down-forwards and up-backwards have one parity and up-forwards and
down-backwards the other, no two blocks need the same slot. Needs an even number of devices.
"""

from __future__ import annotations

from gemini.schedule.block import BACKWARD, FORWARD, Action
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Order the blocks of both replicas by their slots for equal forward and backward times."""
    ndevs = placement.ndevs
    half = ndevs // 2
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(ndevs)]
    for mid in range(nmicros):
        unit, position = divmod(mid, half)
        entry = unit * 2 * ndevs + 2 * position
        for stage in range(ndevs):
            for replica, dev in ((0, stage), (ndevs, ndevs - 1 - stage)):
                rows[dev].append((entry + stage, Action(replica + stage, FORWARD, mid)))
                rows[dev].append((entry + 2 * ndevs - 1 - stage, Action(replica + stage, BACKWARD, mid)))
    return [[action for _, action in sorted(row)] for row in rows]


CHIMERA = ScheduleEntry(
    "chimera",
    "two replicas in opposite directions; a micro-batch of the plan is a pair, one through each",
    "xshape",
    orders,
    admits=lambda ndevs, _micros, _chunks: ndevs % 2 == 0,
    admissible="an even number of devices, any number of pairs of micro-batches",
)
