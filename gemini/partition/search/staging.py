"""Staging: from the worker of each item to stages, as few as can be.

Workers may need each other in both directions. Then a worker runs several stages:

    worker 0   a ──► b        d          stages  {a, b}  {c}  {d}
                      ╲      ╱           workers    0     1    0
    worker 1           ► c ─►

Items are taken in order, a worker at a time for as long as it has something to run: each such run is a stage. Then
stages of one worker are merged where no way leads from the one to the other through a third.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.problem import Problem


def stages_of(problem: Problem, part_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """The stage of each item, numbered in order, and the worker of each stage."""
    runs = min((_runs(problem, part_of), _levels(problem, part_of)), key=max)
    return _merged(problem, part_of, runs)


def _runs(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Stages by always running the worker that can do the most before it must wait."""
    missing = [len(before) for before in problem.predecessors]
    ready: list[list[int]] = [[] for _ in range(problem.nparts)]
    for at, count in enumerate(missing):
        if not count:
            ready[part_of[at]].append(at)
    stage_of = [-1] * len(problem.items)
    stage = 0
    while any(ready):
        closures = [_closure(problem, part_of, missing, items) if items else [] for items in ready]
        worker = max(range(problem.nparts), key=lambda w: (_finished(problem, closures[w]), len(closures[w]), -w))
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


def _finished(problem: Problem, closure: list[int]) -> float:
    return sum(problem.items[at].ms for at in closure)


def _closure(problem: Problem, part_of: Sequence[int], missing: Sequence[int], ready: Sequence[int]) -> list[int]:
    """What a worker can run now, one item enabling the next."""
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


def _levels(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Stages by how often the longest way to an item changes the worker."""
    level = [0] * len(problem.items)
    for at in range(len(problem.items)):
        for before in problem.predecessors[at]:
            level[at] = max(level[at], level[before] + (part_of[before] != part_of[at]))
    keys = sorted({(level[at], part_of[at]) for at in range(len(level))})
    number = {key: stage for stage, key in enumerate(keys)}
    return [number[level[at], part_of[at]] for at in range(len(level))]


def _merged(problem: Problem, part_of: Sequence[int], stage_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge stages of a worker for as long as the stages can still be put in an order."""
    count = max(stage_of) + 1
    worker_of = [0] * count
    for at, stage in enumerate(stage_of):
        worker_of[stage] = part_of[at]
    after = [0] * count  # bit masks of the stages that read from each
    for edge in problem.edges:
        one, other = stage_of[edge.source], stage_of[edge.target]
        if one != other:
            after[one] |= 1 << other
    home = list(range(count))
    for stage in range(count):
        for earlier in range(stage - 1, -1, -1):
            same = worker_of[earlier] == worker_of[stage] and home[earlier] == earlier
            if same and not _leads_through(after, earlier, stage):
                _contract(after, earlier, stage)
                home[stage] = earlier
                break
    return _numbered(problem, [_root(home, stage) for stage in stage_of], worker_of)


def _root(home: Sequence[int], stage: int) -> int:
    while home[stage] != stage:
        stage = home[stage]
    return stage


def _leads_through(after: Sequence[int], one: int, other: int) -> bool:
    """Whether a way leads from one stage to another, or back, through a third."""
    return _reaches(after, after[one] & ~(1 << other), other) or _reaches(after, after[other] & ~(1 << one), one)


def _reaches(after: Sequence[int], start: int, goal: int) -> bool:
    seen = pending = start
    while pending:
        if seen >> goal & 1:
            return True
        lowest = pending & -pending
        pending ^= lowest
        fresh = after[lowest.bit_length() - 1] & ~seen
        seen |= fresh
        pending |= fresh
    return bool(seen >> goal & 1)


def _contract(after: list[int], kept: int, gone: int) -> None:
    bit_kept, bit_gone = 1 << kept, 1 << gone
    after[kept] = (after[kept] | after[gone]) & ~(bit_kept | bit_gone)
    after[gone] = 0
    for stage, mask in enumerate(after):
        if mask & bit_gone:
            after[stage] = (mask & ~bit_gone) | (bit_kept if stage != kept else 0)


def _numbered(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Stages numbered in an order in which values flow forward."""
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
