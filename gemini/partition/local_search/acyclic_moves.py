"""Global moves: an item goes to any block, whatever the numbers say, if the blocks can still be put in an order.

The graph of blocks is kept with the number of edges between each two. A move is tried on it; where no circle appears,
it is made and the blocks get new numbers.
"""

from __future__ import annotations

import random

from gemini.partition.local_search.search_state import State

_MOST = 200  # moves that renumber


class Quotient:
    """The graph of blocks: how many edges lead from each to each other."""

    def __init__(self, state: State) -> None:
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
        """Count the edges of an item at another block."""
        block_of, problem = self.state.block_of, self.state.problem
        for before in problem.predecessors[at]:
            self._add(block_of[before], source, -1)
            self._add(block_of[before], target, 1)
        for after in problem.successors[at]:
            self._add(source, block_of[after], -1)
            self._add(target, block_of[after], 1)

    def order(self) -> list[int] | None:
        """Blocks in an order in which edges lead forward; None where they lead in a circle."""
        missing = [0] * self.count
        for others in self.edges:
            for other in others:
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


def rearrange(state: State, limit: float, rng: random.Random) -> bool:
    """Global moves that lower the load of a worker beyond `limit`, or cut less within it; whether any was made."""
    quotient = Quotient(state)
    items = list(range(len(state.block_of)))
    rng.shuffle(items)
    made = 0
    for at in items:
        source = state.block_of[at]
        target = _better(state, quotient, at, limit)
        if target is None:
            continue
        state.move(at, target)
        made += 1
        order = quotient.order()
        if order is None:
            raise AssertionError(f"blocks in a circle after moving item {at} from block {source} to {target}")
        if order != list(range(quotient.count)):
            state.renumber(order)
            quotient = Quotient(state)
        if made == _MOST:
            break
    return made > 0


def _better(state: State, quotient: Quotient, at: int, limit: float) -> int | None:
    """The block outside the span of an item that improves most, already counted in the quotient; None if none does."""
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
        calmer = min(state.unrest(changes), 0.0) if state.loads[worker] > limit else 0.0
        within = state.peak_after(changes) <= max(limit, state.loads[worker])
        if within and (calmer < -1e-9 or cut < -1e-9) and state.excess(at, target) <= 1e-9:
            found.append((calmer, cut, target))
    for _, _, target in sorted(found):
        quotient.shift(at, source, target)
        if quotient.order() is not None:
            return target
        quotient.shift(at, target, source)
    return None
