"""1F1B for any stages on any workers: who does what next, where a worker may have several stages.

Stage s of S starts no micro-batch while S − s of its own wait for their backward, which bounds memory as 1F1B does.
Within that, a worker that is free takes the oldest micro-batch of what is there: backwards first, or forwards first to
keep later workers busy. Both are tried, and the shorter is kept; backwards first with one stage a worker is 1F1B.

    worker 0 has stages 0 and 2     0F0 0F1 2F0 0F2 2F1 2B0 …
    worker 1 has stages 1 and 3       . 1F0 1F1 3F0 3B0 1F2 …
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

from gemini.schedule.block import FORWARD, Action, Block
from gemini.schedule.schedplan import SchedPlan

Task = tuple[Block, int]


def mixed_orders(placement: SchedPlan, nmicros: int) -> list[list[Action]]:
    """The order of each worker, found by running the rules."""
    runs = [_Run(placement, nmicros, urgent).run() for urgent in (_backward_first, _forward_first)]
    return min(runs, key=lambda run: run.now).rows


class _Run:
    """A rule at work. A task is a block of the placement and a micro-batch; the least key is taken first."""

    def __init__(self, placement: SchedPlan, nmicros: int, urgent: Callable[[Task], tuple[int, ...]]) -> None:
        self.placement, self.urgent = placement, urgent
        self.blocks = placement.chain_blocks()
        self.home = {block: placement.device(block)[0] for block in self.blocks}
        nstages = 1 + max(block.stage or 0 for block in self.blocks)
        learns = {block.stage for block in self.blocks if block.btype != FORWARD}
        self.room = [nstages - stage if stage in learns else nmicros for stage in range(nstages)]
        self.waiting = {(block, mid): len(block.before) for block in self.blocks for mid in range(nmicros)}
        self.there: list[list[Task]] = [[] for _ in range(placement.ndevs)]
        self.next_forward = [0] * nstages
        self.rows: list[list[Action]] = [[] for _ in range(placement.ndevs)]
        self.busy = [False] * placement.ndevs
        self.events: list[tuple[float, int, Callable[[], int]]] = []  # time, order of making, what happens
        self.now = 0.0
        self.made = count()

    def run(self) -> _Run:
        """Go on until nothing happens any more."""
        for (block, mid), missing in self.waiting.items():
            if not missing:
                self.there[self.home[block]].append((block, mid))
        for worker in range(self.placement.ndevs):
            self._take(worker)
        while self.events:
            self.now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == self.now:  # all that is there at a time is chosen from
                touched.add(heapq.heappop(self.events)[2]())
            for worker in sorted(touched):
                self._take(worker)
        return self

    def _take(self, worker: int) -> None:
        ready = [task for task in self.there[worker] if self._may_start(*task)]
        if self.busy[worker] or not ready:
            return
        block, mid = min(ready, key=self.urgent)
        self.there[worker].remove((block, mid))
        self.busy[worker] = True
        if block.btype == FORWARD:
            self.room[block.stage or 0] -= 1
            self.next_forward[block.stage or 0] += 1
        self.rows[worker].append(Action(block.stage or 0, block.btype, mid))
        self._at(self.now + block.span, partial(self._end, block, mid))

    def _may_start(self, block: Block, mid: int) -> bool:
        stage = block.stage or 0
        return block.btype != FORWARD or (self.room[stage] > 0 and self.next_forward[stage] == mid)

    def _end(self, block: Block, mid: int) -> int:
        self.busy[self.home[block]] = False
        if block.btype != FORWARD:
            self.room[block.stage or 0] += 1
        for later in block.after:
            self._at(self.now + self.placement.delay(block, later), partial(self._arrive, later, mid))
        return self.home[block]

    def _arrive(self, block: Block, mid: int) -> int:
        self.waiting[block, mid] -= 1
        if not self.waiting[block, mid]:
            self.there[self.home[block]].append((block, mid))
        return self.home[block]

    def _at(self, time: float, what: Callable[[], int]) -> None:
        heapq.heappush(self.events, (time, next(self.made), what))


def _backward_first(task: Task) -> tuple[int, ...]:
    block, mid = task
    return (block.btype == FORWARD, mid, -(block.stage or 0))


def _forward_first(task: Task) -> tuple[int, ...]:
    block, mid = task
    return (block.btype != FORWARD, mid, -(block.stage or 0))
