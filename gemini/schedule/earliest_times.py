"""Earliest times: the earliest start of every block for a fixed order on each device.

The runtime does the same: a device runs its blocks in the planned order and starts each as soon as its
inputs have arrived. Times are longest paths in the graph of dependencies and device orders.
"""

from __future__ import annotations

from gemini.errors import InvalidPlanError
from gemini.schedule.block import Block, Number
from gemini.schedule.schedplan import SchedPlan


def earliest_starts(plan: SchedPlan) -> dict[Block, Number]:
    """Longest-path start times; raises `InvalidPlanError` if order and dependencies form a cycle."""
    blocks = plan.all_blocks()
    previous: dict[Block, list[tuple[Block, Number]]] = {
        block: [(prev, plan.delay(prev, block)) for prev in block.before if prev in plan] for block in blocks
    }
    last: list[Block | None] = [None] * plan.ndevs
    for block in blocks:
        for dev in plan.device(block):
            before = last[dev]
            if before is not None:
                previous[block].append((before, 0))
            last[dev] = block
    return _longest_paths(previous)


def _longest_paths(previous: dict[Block, list[tuple[Block, Number]]]) -> dict[Block, Number]:
    followers: dict[Block, list[Block]] = {block: [] for block in previous}
    missing = {block: len(prevs) for block, prevs in previous.items()}
    for block, prevs in previous.items():
        for prev, _ in prevs:
            followers[prev].append(block)
    ready = [block for block, count in missing.items() if not count]
    starts: dict[Block, Number] = {}
    while ready:
        block = ready.pop()
        starts[block] = max((starts[prev] + prev.span + delay for prev, delay in previous[block]), default=0)
        for later in followers[block]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if len(starts) < len(previous):
        stuck = sorted(str(block) for block in previous if block not in starts)
        raise InvalidPlanError(
            f"deadlock: the order on the devices prevents these blocks from starting: {', '.join(stuck[:12])}"
            + (f" and {len(stuck) - 12} more" if len(stuck) > 12 else "")
            + "\n    → simulate(plan) shows which wait for each other"
        )
    return starts
