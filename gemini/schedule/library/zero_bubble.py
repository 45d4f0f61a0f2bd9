"""Zero bubble H1 and H2: the backward split in input gradient (I) and weight gradient (W).

Other stages wait only for the input gradient; weight gradients fill idle time.

    H1      dev 0   F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 …          holds P everywhere, as 1F1B does
            dev 1    . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 …          makespan 3N + P − 1 with F = I = W
            dev 2    .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 …
            dev 3    .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 …

    H2      dev 0   F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 …             holds 2P − 1 everywhere,
            dev 1    . F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 …             and no device ever waits between
            dev 2    .  . F0 F1 F2 I0 F3 I1 F4 I2 F5 …                its first block and its last
            dev 3    .  .  . F0 I0 F1 I1 F2 I2 F3 …

Device d delays its weight gradients by d (H1) or 2d (H2) micro-batches, which makes the memory equal everywhere.
"""

from __future__ import annotations

from gemini.schedule.block import Action
from gemini.schedule.library.order_program import run_program
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders_h1(placement: SchedPlan, nmicros: int) -> Orders:
    """P − d forwards before the first input gradient, weight gradients d behind."""
    ndevs = placement.ndevs
    return [_row(dev, ndevs - dev, dev, nmicros) for dev in range(ndevs)]


def orders_h2(placement: SchedPlan, nmicros: int) -> Orders:
    """2(P − d) − 1 forwards before the first input gradient, weight gradients 2d behind."""
    ndevs = placement.ndevs
    return [_row(dev, 2 * (ndevs - dev) - 1, 2 * dev, nmicros) for dev in range(ndevs)]


def _row(dev: int, warm: int, behind: int, nmicros: int) -> list[Action]:
    program = [(warm, "F0"), (behind, "I0 F0"), (nmicros, "I0 W0 F0"), (behind, "W0")]
    return run_program(program, [dev], nmicros, split=True)


ZB_H1 = ScheduleEntry(
    "zb_h1", "backward split, weight gradients fill the bubble, memory of 1F1B", "vshape", orders_h1, split=True
)
ZB_H2 = ScheduleEntry(
    "zb_h2",
    "backward split and a longer warm-up: no device ever waits, memory 2P − 1",
    "vshape",
    orders_h2,
    split=True,
)
