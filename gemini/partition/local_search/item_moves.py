"""Refinement: moves of single items that first balance the workers, then cut less.

*Balance* takes any move that lowers the smoothed maximum of the loads. *Trim* is a Fiduccia–Mattheyses pass: the move
of highest gain is made even where the gain is negative, each item at most once, and the best point of the walk is kept.
Which blocks an item may move to is what the variants differ in (Moreira, Popp, Schulz: Graph Partitioning with
Acyclicity Constraints): *simple* moves go to the neighbouring block, *advanced* ones to any block that the edges allow.
"""

from __future__ import annotations

import heapq
import random
from math import inf

from gemini.partition.local_search.search_state import State

REACH: dict[str, int | None] = {"simple": 1, "advanced": None}
_MOVES_AN_ITEM = 3  # at most, on average, in one balancing


def refine(state: State, moves: str, rng: random.Random, slack: float = 0.0, passes: int = 4) -> None:
    """Improve a state: memory, then the bottleneck, then the cut within the bottleneck reached."""
    reach = REACH[moves]
    if 0 in state.members:
        fill_blocks(state)
    excess = inf
    while 0 < state.memory_excess() < 0.7 * excess:  # for as long as it helps much
        excess = state.memory_excess()
        relieve(state, reach, rng)
    balance(state, reach, rng)
    limit = state.bottleneck * (1 + slack)
    for _ in range(passes):
        if not trim(state, limit, reach, rng):
            break


# ── balance ────────────────────────────────────────────────────────────────────────────────────────────────────────
def balance(state: State, reach: int | None, rng: random.Random) -> None:
    """Make moves that lower the smoothed maximum of the loads, or memory beyond the limits, until there are none."""
    pending = list(range(len(state.block_of)))
    left = _MOVES_AN_ITEM * len(pending)
    while left > 0:
        rng.shuffle(pending)
        touched: set[int] = set()
        for at in pending:
            target = _calmest(state, at, reach)
            if target is not None:
                state.move(at, target)
                left -= 1
                touched.add(at)
                touched.update(state.problem.predecessors[at], state.problem.successors[at])
        if not touched:
            break
        pending = sorted(touched)


def _calmest(state: State, at: int, reach: int | None) -> int | None:
    """The block where an item disturbs least, if it is better there than where it is."""
    plain = state.memory is None and state.transfers.free  # then only the work of the item counts
    if plain and not state.ms[at]:
        return None
    short = state.memory_excess() > 0
    load = state.loads[state.worker_of[state.block_of[at]]]
    best, best_excess, best_unrest = None, 0.0, -1e-9
    for target in state.targets(at, reach):
        worker = state.worker_of[target]
        if plain and state.loads[worker] + state.ms[at] / state.speeds[worker] >= load:
            continue
        cut, changes = state.effect(at, target)
        unrest = state.unrest(changes) + 1e-6 * cut / (state.cut + 1e-9)
        if not short and unrest >= best_unrest:
            continue
        excess = state.excess(at, target)
        if excess < best_excess - 1e-9 or (excess <= best_excess + 1e-9 and unrest < best_unrest):
            best, best_excess, best_unrest = target, min(excess, 0.0), unrest
    return best


# ── passes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def trim(state: State, limit: float, reach: int | None, rng: random.Random) -> bool:
    """One pass that cuts less while no load passes a limit; whether it found something."""
    return _Pass(state, limit, reach, rng).run()


def relieve(state: State, reach: int | None, rng: random.Random) -> bool:
    """One pass that takes items from workers whose memory is too small; whether it found something."""
    return _Relief(state, inf, reach, rng).run()


class _Pass:
    """One Fiduccia–Mattheyses pass: the best move of each item waits on a heap."""

    patience = 60  # moves without a new best before the pass ends

    def __init__(self, state: State, limit: float, reach: int | None, rng: random.Random) -> None:
        self.state, self.limit, self.reach, self.rng = state, limit, reach, rng
        self.heap: list[tuple[float, float, int, int]] = []  # price, tie, item, block
        self.locked: set[int] = set()

    def run(self) -> bool:
        """Walk, and return to the best point of the walk; whether it is better than the start."""
        state = self.state
        for at in range(len(state.block_of)):
            self._offer(at)
        undo: list[tuple[int, int]] = []
        best, kept = self._measure(), 0
        least = 1e-9 * (best + 1e-9)
        while self.heap and best > 0 and len(undo) - kept < self.patience:
            move = self._next()
            if move is None:
                continue
            at, target = move
            undo.append((at, state.block_of[at]))
            state.move(at, target)
            self.locked.add(at)
            if self._measure() < best - least:
                best, kept = self._measure(), len(undo)
            for other in (*state.problem.predecessors[at], *state.problem.successors[at]):
                if other not in self.locked:
                    self._offer(other)
        for at, source in reversed(undo[kept:]):
            state.move(at, source)
        return kept > 0

    def _next(self) -> tuple[int, int] | None:
        """The move on top of the heap, if it is still as good as it was when it was put there."""
        promised, _, at, target = heapq.heappop(self.heap)
        if at in self.locked:
            return None
        low, high = self.state.span(at)
        stays = not low <= target <= high or self.state.is_last(at)
        price = None if stays else self._price(at, target)
        if price is None or price > promised + 1e-12 or not self._fits(at, target):
            self._offer(at, above=promised)
            return None
        return at, target

    def _offer(self, at: int, above: float | None = None) -> None:
        """Put the best move of an item on the heap; with `above`, only one that is worse than that."""
        best: tuple[float, int] | None = None
        for target in self.state.targets(at, self.reach):
            price = self._price(at, target)
            if price is None or (above is not None and price <= above + 1e-12):
                continue
            if (best is None or price < best[0]) and self._fits(at, target):
                best = (price, target)
        if best is not None:
            heapq.heappush(self.heap, (best[0], self.rng.random(), at, best[1]))

    def _measure(self) -> float:
        """What the pass makes smaller."""
        return self.state.cut

    def _fits(self, at: int, target: int) -> bool:
        """Whether memory allows a move."""
        return self.state.memory is None or self.state.excess(at, target) <= 1e-9

    def _price(self, at: int, target: int) -> float | None:
        """How the cut changes if an item moves within its span; None where loads do not allow it."""
        state = self.state
        other = state.worker_of[target]
        if state.loads[other] + state.ms[at] / state.speeds[other] > self.limit and state.ms[at] > 0:
            return None
        if state.transfers.free:
            return state.transfers.change(at, state.worker_of[state.block_of[at]], other)
        cut, changes = state.effect(at, target)
        if any(change > 0 and state.loads[worker] + change > self.limit for worker, change in changes.items()):
            return None
        return cut


class _Relief(_Pass):
    """A pass for memory: only what leaves a worker that is short of it moves, what relieves most first."""

    patience = 200  # a row of items that keep nothing may hide one that does

    def _measure(self) -> float:
        return self.state.memory_excess()

    def _fits(self, at: int, target: int) -> bool:
        return self.state.worker_of[target] != self.state.worker_of[self.state.block_of[at]]

    def _price(self, at: int, target: int) -> float | None:
        state = self.state
        if state.memory is None or not state.memory.excess(state.worker_of[state.block_of[at]]):
            return None
        excess = state.excess(at, target)
        return None if excess > 1e-9 else excess


def fill_blocks(state: State) -> None:
    """Fill the blocks of workers without items, where edges and pins allow it."""
    for block, worker in enumerate(state.worker_of):
        if not state.members[worker] and not _passed_on(state, block, -1):
            _passed_on(state, block, 1)


def _passed_on(state: State, empty: int, side: int) -> bool:
    """Pass items on towards an empty block, from its left (−1) or its right (1)."""
    done: list[tuple[int, int]] = []
    target, source = empty, empty + side
    while 0 <= source < len(state.worker_of):
        at = _spare(state, source, target)
        if at is None:
            break
        done.append((at, source))
        state.move(at, target)
        if source in state.block_of:
            return True
        target, source = source, source + side
    for at, before in reversed(done):
        state.move(at, before)
    return False


def _spare(state: State, source: int, target: int) -> int | None:
    """The lightest item of a block that may go to the next one."""
    worker = state.worker_of[target]
    able = []
    for at, block in enumerate(state.block_of):
        if block == source and state.problem.items[at].pin in (None, worker):
            low, high = state.span(at)
            if low <= target <= high:
                able.append(at)
    return min(able, key=lambda at: (state.ms[at] == 0, state.ms[at], at), default=None)
