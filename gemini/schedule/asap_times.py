"""ASAP times: start times for blocks that have devices and dependencies but no order yet.

Of all blocks whose inputs are ready, the one that can start first is scheduled; ties follow the input order. This
assigns the times of a placement, without regard to memory or to several micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from gemini.errors import PlacementError
from gemini.schedule.block import Block, Number
from gemini.schedule.link_costs import FREE, Links


def asap(homes: Mapping[Block, tuple[int, ...]], links: Links = FREE) -> dict[Block, Number]:
    """Return a start time for every block of `homes` (block → devices), by start time and then device."""
    rank = {block: index for index, block in enumerate(homes)}
    waiting = {block: sum(1 for prev in block.before if prev in homes) for block in homes}
    free: dict[int, Number] = {}
    arrived: dict[Block, Number] = dict.fromkeys(homes, 0)
    starts: dict[Block, Number] = {}

    def earliest(block: Block) -> Number:
        return max([arrived[block], *(free.get(dev, 0) for dev in homes[block])])

    ready = [(earliest(block), rank[block], block) for block, count in waiting.items() if not count]
    heapq.heapify(ready)
    while ready:
        start, index, block = heapq.heappop(ready)
        if earliest(block) > start:  # a device became busy meanwhile: retry later
            heapq.heappush(ready, (earliest(block), index, block))
            continue
        starts[block] = start
        for dev in homes[block]:
            free[dev] = start + block.span
        for later in block.after:
            if later not in homes:
                continue
            delay = links.delay(homes[block], homes[later], later.nbytes.get(block, 0))
            arrived[later] = max(arrived[later], start + block.span + delay)
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (earliest(later), rank[later], later))
    if len(starts) < len(homes):
        stuck = ", ".join(str(block) for block in homes if block not in starts)
        raise PlacementError(
            f"these blocks depend on each other in a cycle: {stuck}\n    → remove one of the dependencies between them"
        )
    return dict(sorted(starts.items(), key=lambda item: (item[1], homes[item[0]], rank[item[0]])))
