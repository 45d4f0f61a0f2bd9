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
    modules = {key: trace for key, trace in root.inside.items() if key != id(root.module)}
    while not _is_even(list(modules.values()), workers, total):
        splittable = [trace for trace in modules.values() if can_split(trace)]
        largest = max(splittable, key=lambda trace: (trace.work, -trace.order), default=None)
        if largest is None:
            break
        modules.pop(id(largest.module))
        for key, inner in largest.inside.items():
            modules.setdefault(key, inner)
    return distribute(_worth_placing(modules, total), workers)


def can_split(trace: ModuleTrace) -> bool:
    """Whether the modules inside can run remotely in place of a module."""
    if trace.ms > _CLEAR_MS and trace.inside_ms < (1 - _GLUE) * trace.ms:
        return False
    return any(True for one in trace.inside.values() for _ in one.module.parameters())


def distribute(modules: list[ModuleTrace], workers: int) -> list[tuple[ModuleTrace, int]]:
    """Assign contiguous runs to workers, minimizing the largest load."""
    return _fill_workers(modules, workers, _minimal_load(modules, workers))


def _is_even(modules: list[ModuleTrace], workers: int, total: float) -> bool:
    """Whether no more cuts are needed."""
    if len(modules) < workers:
        return False
    kept = sorted((trace for trace in modules if _is_worth_placing(trace, total)), key=lambda trace: trace.order)
    if len(kept) < workers:
        return False
    if _minimal_load(kept, workers) <= _UNEVEN * sum(trace.work for trace in kept) / workers:
        return True
    largest = max((trace.work for trace in kept if can_split(trace)), default=0.0)
    return largest <= total / (_PIECES * workers)


def _minimal_load(modules: list[ModuleTrace], workers: int) -> float:
    """Return the smallest limit at which contiguous runs fill no more than all workers."""
    low, high = max((trace.work for trace in modules), default=0.0), sum(trace.work for trace in modules)
    for _ in range(50):
        middle = (low + high) / 2
        if _count_runs(modules, middle) <= workers:
            high = middle
        else:
            low = middle
    return high


def _count_runs(modules: list[ModuleTrace], limit: float) -> int:
    count, load = 1, 0.0
    for trace in modules:
        if load + trace.work > limit and load:
            count, load = count + 1, 0.0
        load += trace.work
    return count


def _fill_workers(modules: list[ModuleTrace], workers: int, limit: float) -> list[tuple[ModuleTrace, int]]:
    """Fill workers up to the limit; leave at least one module for each that is still empty."""
    found: list[tuple[ModuleTrace, int]] = []
    place, load = 0, 0.0
    for at, trace in enumerate(modules):
        full = load + trace.work > limit * (1 + 1e-9)
        needed = len(modules) - at <= workers - 1 - place
        if load and place < workers - 1 and (full or needed):
            place, load = place + 1, 0.0
        found.append((trace, place))
        load += max(trace.work, _SMALLEST)
    return found


def _worth_placing(modules: dict[int, ModuleTrace], total: float) -> list[ModuleTrace]:
    """Return the modules that are worth a message and inside no other, in the order of their calls."""
    inside = {id(part) for trace in modules.values() for part in trace.module.modules() if part is not trace.module}
    kept = [trace for key, trace in modules.items() if _is_worth_placing(trace, total) and key not in inside]
    return sorted(kept, key=lambda trace: trace.order)


def _is_worth_placing(trace: ModuleTrace, total: float) -> bool:
    return trace.work > _TINY * total or any(True for _ in trace.module.parameters())
