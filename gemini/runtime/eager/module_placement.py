"""Module placement: which modules run remotely, and in which worker.

Starting with the modules that the model itself calls, the largest is replaced by the modules that it calls, until the
load of the workers is balanced. The Python code between remote modules runs in the controller. Modules are assigned in
the order of their first call, in contiguous runs, so that few values change workers. Placement depends on estimated
work, not on time, unless a module clearly spends its time in its own Python code: a model gets the same placement in
every run.
"""

from __future__ import annotations

from gemini.runtime.eager.first_call_trace import ModuleTrace

_UNEVEN = 1.15  # the largest load over the average: cut further above this
_PIECES = 4  # modules per worker; beyond that a larger one is not cut for balance alone
_TINY = 0.002  # of all work: below this a module without parameters is not worth a message
_GLUE = 0.5  # a module that spends more than this in its own code stays whole …
_CLEAR_MS = 20.0  # … where that exceeds noise
_SMALLEST = 1e-9


def place_modules(root: ModuleTrace, workers: int) -> list[tuple[ModuleTrace, int]]:
    """Return remote modules with the index of their worker; fewer than two workers where the model cannot be cut."""
    total = root.inside_work
    units = {key: seen for key, seen in root.inside.items() if key != id(root.module)}
    while not _is_even(list(units.values()), workers, total):
        splittable = [seen for seen in units.values() if can_split(seen)]
        largest = max(splittable, key=lambda seen: (seen.work, -seen.order), default=None)
        if largest is None:
            break
        units.pop(id(largest.module))
        for key, inner in largest.inside.items():
            units.setdefault(key, inner)
    return distribute(_worth_placing(units, total), workers)


def can_split(seen: ModuleTrace) -> bool:
    """Whether the modules inside can run remotely in place of a module."""
    if seen.ms > _CLEAR_MS and seen.inside_ms < (1 - _GLUE) * seen.ms:
        return False
    return any(True for one in seen.inside.values() for _ in one.module.parameters())


def distribute(units: list[ModuleTrace], workers: int) -> list[tuple[ModuleTrace, int]]:
    """Assign contiguous runs to workers, minimizing the largest load."""
    return _fill_workers(units, workers, _minimal_load(units, workers))


def _is_even(units: list[ModuleTrace], workers: int, total: float) -> bool:
    """Whether no more cuts are needed."""
    if len(units) < workers:
        return False
    kept = sorted((seen for seen in units if _is_worth_placing(seen, total)), key=lambda seen: seen.order)
    if len(kept) < workers:
        return False
    if _minimal_load(kept, workers) <= _UNEVEN * sum(seen.work for seen in kept) / workers:
        return True
    largest = max((seen.work for seen in kept if can_split(seen)), default=0.0)
    return largest <= total / (_PIECES * workers)


def _minimal_load(units: list[ModuleTrace], workers: int) -> float:
    """Return the smallest limit at which contiguous runs fill no more than all workers."""
    low, high = max((seen.work for seen in units), default=0.0), sum(seen.work for seen in units)
    for _ in range(50):
        middle = (low + high) / 2
        if _count_runs(units, middle) <= workers:
            high = middle
        else:
            low = middle
    return high


def _count_runs(units: list[ModuleTrace], limit: float) -> int:
    count, load = 1, 0.0
    for seen in units:
        if load + seen.work > limit and load:
            count, load = count + 1, 0.0
        load += seen.work
    return count


def _fill_workers(units: list[ModuleTrace], workers: int, limit: float) -> list[tuple[ModuleTrace, int]]:
    """Fill workers up to the limit; leave at least one module for each that is still empty."""
    found: list[tuple[ModuleTrace, int]] = []
    place, load = 0, 0.0
    for at, seen in enumerate(units):
        full = load + seen.work > limit * (1 + 1e-9)
        needed = len(units) - at <= workers - 1 - place
        if load and place < workers - 1 and (full or needed):
            place, load = place + 1, 0.0
        found.append((seen, place))
        load += max(seen.work, _SMALLEST)
    return found


def _worth_placing(units: dict[int, ModuleTrace], total: float) -> list[ModuleTrace]:
    """Return the modules that are worth a message and inside no other, in the order of their calls."""
    inside = {id(part) for seen in units.values() for part in seen.module.modules() if part is not seen.module}
    kept = [seen for key, seen in units.items() if _is_worth_placing(seen, total) and key not in inside]
    return sorted(kept, key=lambda seen: seen.order)


def _is_worth_placing(seen: ModuleTrace, total: float) -> bool:
    return seen.work > _TINY * total or any(True for _ in seen.module.parameters())
