"""Acyclic moves: move an item to any block, if the graph of blocks stays acyclic.

The graph of blocks is maintained with edge multiplicities. A move is tried on it; if no cycle appears, it is applied
and the blocks are renumbered.
"""

from __future__ import annotations

import random

from gemini.partition.local_search.search_state import SearchState

_MOST = 200  # moves that renumber blocks


class Quotient:
    """The graph of blocks, with the number of edges between each pair."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.count = len(state.worker_of)
        self.edges: list[dict[int, int]] = [{} for _ in range(self.count)]
        block_of = state.block_of
        for before, afters in enumerate(state.problem.successors):
            for after in afters:
                self._add(block_of[before], block_of[after], 1)

    def _add(self, one: int, other: int, change: int) -> None:
        if one == other:
            return
        left = self.edges[one].get(other, 0) + change
        if left:
            self.edges[one][other] = left
        else:
            del self.edges[one][other]

    def shift(self, at: int, source: int, target: int) -> None:
        """Move the edges of an item from one block to another."""
        block_of, problem = self.state.block_of, self.state.problem
        for before in problem.predecessors[at]:
            self._add(block_of[before], source, -1)
            self._add(block_of[before], target, 1)
        for after in problem.successors[at]:
            self._add(source, block_of[after], -1)
            self._add(target, block_of[after], 1)

    def order(self) -> list[int] | None:
        """Return the blocks in topological order; None if there is a cycle."""
        missing = [0] * self.count
        for targets in self.edges:
            for other in targets:
                missing[other] += 1
        ready = [block for block in range(self.count) if not missing[block]][::-1]
        found = []
        while ready:
            block = ready.pop()
            found.append(block)
            for other in self.edges[block]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        return found if len(found) == self.count else None


def rearrange(state: SearchState, limit: float, rng: random.Random) -> bool:
    """Make global moves that unload workers beyond `limit` or reduce the cut within it; return whether any was made."""
    quotient = Quotient(state)
    items = list(range(len(state.block_of)))
    rng.shuffle(items)
    made = 0
    for at in items:
        source = state.block_of[at]
        target = _find_better_block(state, quotient, at, limit)
        if target is None:
            continue
        state.move(at, target)
        made += 1
        order = quotient.order()
        if order is None:
            raise AssertionError(f"blocks form a cycle after moving item {at} from block {source} to {target}")
        if order != list(range(quotient.count)):
            state.renumber(order)
            quotient = Quotient(state)
        if made == _MOST:
            break
    return made > 0


def _find_better_block(state: SearchState, quotient: Quotient, at: int, limit: float) -> int | None:
    """Return the best block outside an item's span, already applied to the quotient; None if none improves."""
    source = state.block_of[at]
    low, high = state.span(at)
    worker, pin = state.worker_of[source], state.problem.items[at].pin
    if state.is_last(at):
        return None
    found: list[tuple[float, float, int]] = []
    for target, other in enumerate(state.worker_of):
        if low <= target <= high or other == worker or (pin is not None and pin != other):
            continue
        cut, changes = state.effect(at, target)
        smoother = min(state.balance_change(changes), 0.0) if state.loads[worker] > limit else 0.0
        within = state.peak_after(changes) <= max(limit, state.loads[worker])
        if within and (smoother < -1e-9 or cut < -1e-9) and state.excess(at, target) <= 1e-9:
            found.append((smoother, cut, target))
    for _, _, target in sorted(found):
        quotient.shift(at, source, target)
        if quotient.order() is not None:
            return target
        quotient.shift(at, target, source)
    return None
