"""GPipe: all forwards, then all backwards.

    dev 0   F0 F1 F2 F3  .  .  .  .  .  . B0 ── B1 ── B2 ── B3 ──
    dev 1    . F0 F1 F2 F3  .  .  . B0 ── B1 ── B2 ── B3 ──
    dev 2    .  . F0 F1 F2 F3 B0 ── B1 ── B2 ── B3 ──

Simple, and every device holds the activations of all micro-batches. Makespan (N + P − 1)(F + B). The rule also
applies to other placements: a device runs a block for all micro-batches before its next block.
"""

from __future__ import annotations

from gemini.schedule.block import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Block
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Block by block, each for all micro-batches; gradients and their dependents come last."""
    late: set[Block] = set()
    chain = placement.chain_blocks()
    for block in chain:
        if block.btype in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) or any(prev in late for prev in block.before):
            late.add(block)
    rows: list[list[Action]] = [[] for _ in range(placement.ndevs)]
    for block in [*(block for block in chain if block not in late), *(block for block in chain if block in late)]:
        for dev in placement.device(block):
            rows[dev].extend(Action(block.stage or 0, block.btype, mid) for mid in range(nmicros))
    return rows


GPIPE = ScheduleEntry("gpipe", "all forwards, then all backwards", "vshape", orders, any_placement=True)
