"""Stage builder: group items into few stages, given the worker of each item.

Workers may depend on each other in both directions. Then a worker runs several stages:

    worker 0   a ──► b        d          stages  {a, b}  {c}  {d}
                      ╲      ╱           workers    0     1    0
    worker 1           ► c ─►

Items are scheduled one worker at a time for as long as it has ready items: each such run is a stage. Then stages of one
worker are merged where no path leads from one to the other through a third.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemini.partition.partition_problem import Problem


def build_stages(problem: Problem, part_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the stage of each item, in topological order, and the worker of each stage."""
    runs = min((_greedy_stages(problem, part_of), _level_stages(problem, part_of)), key=max)
    return _merge_stages(problem, part_of, runs)


def _greedy_stages(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Build stages by always running the worker that can do the most before it must wait."""
    missing = [len(before) for before in problem.predecessors]
    ready: list[list[int]] = [[] for _ in range(problem.nparts)]
    for at, count in enumerate(missing):
        if not count:
            ready[part_of[at]].append(at)
    stage_of = [-1] * len(problem.items)
    stage = 0
    while any(ready):
        closures = [_closure(problem, part_of, missing, items) if items else [] for items in ready]
        worker = max(range(problem.nparts), key=lambda w: (_total_ms(problem, closures[w]), len(closures[w]), -w))
        for at in closures[worker]:
            stage_of[at] = stage
        ready[worker] = []
        for at in closures[worker]:
            for later in problem.successors[at]:
                missing[later] -= 1
                if not missing[later] and stage_of[later] < 0:
                    ready[part_of[later]].append(later)
        stage += 1
    return stage_of


def _total_ms(problem: Problem, closure: list[int]) -> float:
    return sum(problem.items[at].ms for at in closure)


def _closure(problem: Problem, part_of: Sequence[int], missing: Sequence[int], ready: Sequence[int]) -> list[int]:
    """Return the items that a worker can run without waiting, one item enabling the next."""
    met: dict[int, int] = {}
    found = list(ready)
    worker = part_of[ready[0]]
    for at in found:  # grows while it is read
        for later in problem.successors[at]:
            if part_of[later] == worker:
                met[later] = met.get(later, 0) + 1
                if met[later] == missing[later]:
                    found.append(later)
    return found


def _level_stages(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Build stages by the worker changes on the longest path to each item."""
    level = [0] * len(problem.items)
    for at in range(len(problem.items)):
        for before in problem.predecessors[at]:
            level[at] = max(level[at], level[before] + (part_of[before] != part_of[at]))
    keys = sorted({(level[at], part_of[at]) for at in range(len(level))})
    number = {key: stage for stage, key in enumerate(keys)}
    return [number[level[at], part_of[at]] for at in range(len(level))]


def _merge_stages(problem: Problem, part_of: Sequence[int], stage_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge stages of the same worker while the graph of stages stays acyclic."""
    count = max(stage_of) + 1
    worker_of = [0] * count
    for at, stage in enumerate(stage_of):
        worker_of[stage] = part_of[at]
    graph = StageGraph(problem, stage_of, count)
    merged_into = list(range(count))
    alive: list[list[int]] = [[] for _ in range(problem.nparts)]  # remaining stages of each worker
    for stage in range(count):
        mine = alive[worker_of[stage]]
        for earlier in reversed(mine):
            if not graph.creates_cycle(earlier, stage):
                graph.merge(earlier, stage)
                merged_into[stage] = earlier
                break
        else:
            mine.append(stage)
    return _number_stages(problem, [merged_into[stage] for stage in stage_of], worker_of)


class StageGraph:
    """The graph of stages while stages are merged, as bit masks."""

    def __init__(self, problem: Problem, stage_of: Sequence[int], count: int) -> None:
        self.after, self.before = [0] * count, [0] * count
        for edge in problem.edges:
            one, other = stage_of[edge.source], stage_of[edge.target]
            if one != other:
                self.after[one] |= 1 << other
                self.before[other] |= 1 << one

    def neighbours(self, stage: int) -> list[int]:
        """Return the stages that a stage reads from or sends to."""
        return list(_bits(self.after[stage] | self.before[stage]))

    def creates_cycle(self, one: int, other: int) -> bool:
        """Return whether a path leads from one stage to the other, or back, through a third."""
        return self._has_indirect_path(one, other) or self._has_indirect_path(other, one)

    def _has_indirect_path(self, one: int, goal: int) -> bool:
        if not self.before[goal] & ~(1 << one):
            return False
        seen = pending = self.after[one] & ~(1 << goal)
        while pending:
            lowest = pending & -pending
            pending ^= lowest
            fresh = self.after[lowest.bit_length() - 1] & ~seen
            seen |= fresh
            pending |= fresh
            if seen >> goal & 1:
                return True
        return False

    def merge(self, kept: int, gone: int) -> None:
        """Merge stage `gone` into stage `kept`."""
        both = ~(1 << kept | 1 << gone)
        for later in _bits(self.after[gone] & both):
            self.before[later] = self.before[later] & ~(1 << gone) | 1 << kept
        for earlier in _bits(self.before[gone] & both):
            self.after[earlier] = self.after[earlier] & ~(1 << gone) | 1 << kept
        self.after[kept] = (self.after[kept] | self.after[gone]) & both
        self.before[kept] = (self.before[kept] | self.before[gone]) & both
        self.after[gone] = self.before[gone] = 0


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _number_stages(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Number stages in topological order."""
    before: dict[int, set[int]] = {stage: set() for stage in stage_of}
    after: dict[int, set[int]] = {stage: set() for stage in stage_of}
    for edge in problem.edges:
        one, other = stage_of[edge.source], stage_of[edge.target]
        if one != other:
            before[other].add(one)
            after[one].add(other)
    number: dict[int, int] = {}
    ready = [stage for stage in before if not before[stage]][::-1]
    while ready:
        stage = ready.pop()
        number[stage] = len(number)
        for later in sorted(after[stage], reverse=True):
            before[later].discard(stage)
            if not before[later]:
                ready.append(later)
    order = sorted(number, key=lambda stage: number[stage])
    return [number[stage] for stage in stage_of], [worker_of[stage] for stage in order]
