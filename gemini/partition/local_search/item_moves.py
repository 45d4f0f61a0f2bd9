"""Item moves: refine a state by moving single items, first to balance workers, then to reduce the cut.

`balance` accepts any move that lowers the smoothed maximum of the loads. `reduce_cut` is a Fiduccia–Mattheyses pass: it
makes the move of highest gain even where the gain is negative, each item at most once, and returns to the best point.
Variants differ in the blocks an item may move to (Moreira, Popp, Schulz: Graph Partitioning with Acyclicity
Constraints): *simple* moves go to the adjacent block, *advanced* ones to any block that the edges allow.
"""

from __future__ import annotations

import heapq
import random
from math import inf

from gemini.partition.local_search.search_state import SearchState

REACH: dict[str, int | None] = {"simple": 1, "advanced": None}
_MOVES_PER_ITEM = 3  # average limit per call of `balance`


def refine(state: SearchState, moves: str, rng: random.Random, slack: float = 0.0, passes: int = 4) -> None:
    """Improve a state: memory, then the bottleneck, then the cut within the bottleneck reached."""
    reach = REACH[moves]
    if 0 in state.members:
        fill_blocks(state)
    excess = inf
    while 0 < state.memory_excess() < 0.7 * excess:  # while it improves substantially
        excess = state.memory_excess()
        reduce_memory_excess(state, reach, rng)
    balance(state, reach, rng)
    limit = state.bottleneck * (1 + slack)
    for _ in range(passes):
        if not reduce_cut(state, limit, reach, rng):
            break


# ── balance ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def balance(state: SearchState, reach: int | None, rng: random.Random) -> None:
    """Make moves that lower the smoothed maximum of the loads, or the memory excess, until there are none."""
    pending = list(range(len(state.block_of)))
    left = _MOVES_PER_ITEM * len(pending)
    while left > 0:
        rng.shuffle(pending)
        touched: set[int] = set()
        for at in pending:
            target = _find_balancing_target(state, at, reach)
            if target is not None:
                state.move(at, target)
                left -= 1
                touched.add(at)
                touched.update(state.problem.predecessors[at], state.problem.successors[at])
        if not touched:
            break
        pending = sorted(touched)


def _find_balancing_target(state: SearchState, at: int, reach: int | None) -> int | None:
    """Return the block that improves balance or memory most if an item moves to it, if any."""
    plain = state.memory is None and state.transfers.free  # then only the compute time of the item counts
    if plain and not state.ms[at]:
        return None
    short = state.memory_excess() > 0
    load = state.loads[state.worker_of[state.block_of[at]]]
    best, best_excess, best_change = None, 0.0, -1e-9
    for target in state.targets(at, reach):
        worker = state.worker_of[target]
        if plain and state.loads[worker] + state.ms[at] / state.speeds[worker] >= load:
            continue
        cut, changes = state.effect(at, target)
        change = state.balance_change(changes) + 1e-6 * cut / (state.cut + 1e-9)
        if not short and change >= best_change:
            continue
        excess = state.excess(at, target)
        if excess < best_excess - 1e-9 or (excess <= best_excess + 1e-9 and change < best_change):
            best, best_excess, best_change = target, min(excess, 0.0), change
    return best


# ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def reduce_cut(state: SearchState, limit: float, reach: int | None, rng: random.Random) -> bool:
    """Run one pass that reduces the cut while no load exceeds a limit; return whether it improved."""
    return _CutPass(state, limit, reach, rng).run()


def reduce_memory_excess(state: SearchState, reach: int | None, rng: random.Random) -> bool:
    """Run one pass that moves items off workers beyond their memory limit; return whether it improved."""
    return _MemoryPass(state, inf, reach, rng).run()


class _CutPass:
    """One Fiduccia–Mattheyses pass over a heap of each item's best move."""

    patience = 60  # moves without a new best before the pass ends

    def __init__(self, state: SearchState, limit: float, reach: int | None, rng: random.Random) -> None:
        self.state, self.limit, self.reach, self.rng = state, limit, reach, rng
        self.heap: list[tuple[float, float, int, int]] = []  # price, tie, item, block
        self.locked: set[int] = set()

    def run(self) -> bool:
        """Make moves, return to the best state reached, and return whether it is better than the start."""
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
        """Return the move on top of the heap, if it is still as good as when it was pushed."""
        expected, _, at, target = heapq.heappop(self.heap)
        if at in self.locked:
            return None
        low, high = self.state.span(at)
        stays = not low <= target <= high or self.state.is_last(at)
        price = None if stays else self._price(at, target)
        if price is None or price > expected + 1e-12 or not self._fits(at, target):
            self._offer(at, above=expected)
            return None
        return at, target

    def _offer(self, at: int, above: float | None = None) -> None:
        """Push the best move of an item; with `above`, only one with a higher price."""
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
        """Return the quantity that the pass minimises."""
        return self.state.cut

    def _fits(self, at: int, target: int) -> bool:
        """Return whether memory allows a move."""
        return self.state.memory is None or self.state.excess(at, target) <= 1e-9

    def _price(self, at: int, target: int) -> float | None:
        """Return the change of the cut if an item moves within its span; None where loads do not allow it."""
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


class _MemoryPass(_CutPass):
    """A pass for memory: moves items off workers beyond their limit, the greatest reduction first."""

    patience = 200  # many items without saved memory may precede one that helps

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


def fill_blocks(state: SearchState) -> None:
    """Fill the blocks of workers without items, where edges and pins allow it.

    The nearest block with a spare item passes one on; blocks in between pass on in turn:

        before   █ █ █ │ █ │   │ █ █          after   █ █ │ █ │ █ │ █ █
                       └───►───┘
    """
    for block, worker in enumerate(state.worker_of):
        if not state.members[worker] and not _shift_item_towards(state, block, -1):
            _shift_item_towards(state, block, 1)


def _shift_item_towards(state: SearchState, empty: int, side: int) -> bool:
    """Shift items towards an empty block from its left (−1) or right (1); return whether it succeeded."""
    done: list[tuple[int, int]] = []
    target, source = empty, empty + side
    while 0 <= source < len(state.worker_of):
        at = _find_spare_item(state, source, target)
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


def _find_spare_item(state: SearchState, source: int, target: int) -> int | None:
    """Return the lightest item of a block that may move to the next one."""
    worker = state.worker_of[target]
    able = []
    for at, block in enumerate(state.block_of):
        if block == source and state.problem.items[at].pin in (None, worker):
            low, high = state.span(at)
            if low <= target <= high:
                able.append(at)
    return min(able, key=lambda at: (state.ms[at] == 0, state.ms[at], at), default=None)
