"""1F1B for any placement: the order of actions where a worker may have several stages.

Stage s of S starts no forward while S − s of its micro-batches await their backward, which bounds memory as in 1F1B.
Within that limit, an idle worker runs the oldest ready micro-batch: backwards first, or forwards first to keep later
workers busy. Both policies are simulated and the shorter step wins; backwards first with one stage per worker is 1F1B.

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


def order_mixed_one_f_one_b(placement: SchedPlan, nmicros: int) -> list[list[Action]]:
    """Return the order of actions of each worker, from an event simulation."""
    runs = [_OneFOneBSimulation(placement, nmicros, urgent).run() for urgent in (_backward_first, _forward_first)]
    return min(runs, key=lambda run: run.now).actions


class _OneFOneBSimulation:
    """One simulated step. A task is a block and a micro-batch; the task of least `urgent` key runs first."""

    def __init__(self, placement: SchedPlan, nmicros: int, urgent: Callable[[Task], tuple[int, ...]]) -> None:
        self.placement, self.urgent = placement, urgent
        self.blocks = placement.chain_blocks()
        self.worker_of = {block: placement.device(block)[0] for block in self.blocks}
        nstages = 1 + max(block.stage or 0 for block in self.blocks)
        trained = {block.stage for block in self.blocks if block.btype != FORWARD}
        self.room = [nstages - stage if stage in trained else nmicros for stage in range(nstages)]
        self.waiting = {(block, mid): len(block.before) for block in self.blocks for mid in range(nmicros)}
        self.ready: list[list[Task]] = [[] for _ in range(placement.ndevs)]
        self.next_forward = [0] * nstages
        self.actions: list[list[Action]] = [[] for _ in range(placement.ndevs)]
        self.busy = [False] * placement.ndevs
        self.events: list[tuple[float, int, Callable[[], int]]] = []  # time, sequence number, event handler
        self.now = 0.0
        self.sequence = count()

    def run(self) -> _OneFOneBSimulation:
        """Process events until none is left."""
        for (block, mid), missing in self.waiting.items():
            if not missing:
                self.ready[self.worker_of[block]].append((block, mid))
        for worker in range(self.placement.ndevs):
            self._take(worker)
        while self.events:
            self.now = self.events[0][0]
            touched = set()
            while (
                self.events and self.events[0][0] == self.now
            ):  # events at the same time are handled before any task starts
                touched.add(heapq.heappop(self.events)[2]())
            for worker in sorted(touched):
                self._take(worker)
        return self

    def _take(self, worker: int) -> None:
        startable = [task for task in self.ready[worker] if self._may_start(*task)]
        if self.busy[worker] or not startable:
            return
        block, mid = min(startable, key=self.urgent)
        self.ready[worker].remove((block, mid))
        self.busy[worker] = True
        if block.btype == FORWARD:
            self.room[block.stage or 0] -= 1
            self.next_forward[block.stage or 0] += 1
        self.actions[worker].append(Action(block.stage or 0, block.btype, mid))
        self._at(self.now + block.span, partial(self._end, block, mid))

    def _may_start(self, block: Block, mid: int) -> bool:
        stage = block.stage or 0
        return block.btype != FORWARD or (self.room[stage] > 0 and self.next_forward[stage] == mid)

    def _end(self, block: Block, mid: int) -> int:
        self.busy[self.worker_of[block]] = False
        if block.btype != FORWARD:
            self.room[block.stage or 0] += 1
        for later in block.after:
            self._at(self.now + self.placement.delay(block, later), partial(self._arrive, later, mid))
        return self.worker_of[block]

    def _arrive(self, block: Block, mid: int) -> int:
        self.waiting[block, mid] -= 1
        if not self.waiting[block, mid]:
            self.ready[self.worker_of[block]].append((block, mid))
        return self.worker_of[block]

    def _at(self, time: float, what: Callable[[], int]) -> None:
        heapq.heappush(self.events, (time, next(self.sequence), what))


def _backward_first(task: Task) -> tuple[int, ...]:
    block, mid = task
    return (block.btype == FORWARD, mid, -(block.stage or 0))


def _forward_first(task: Task) -> tuple[int, ...]:
    block, mid = task
    return (block.btype != FORWARD, mid, -(block.stage or 0))
