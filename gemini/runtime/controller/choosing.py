"""Choosing: which modules become units, and which worker runs each.

Beginning with the modules that the model itself calls, the largest is replaced by the modules it calls in turn, until
no unit is too large to balance. What then remains between units is the model's own Python, which runs here. Units are
dealt out in the order in which they are first called, in runs of neighbours, so that few values change workers.
"""

from __future__ import annotations

from gemini.runtime.controller.observing import Seen

_PIECES = 4  # units a worker, at the least, where the model has that many
_TINY = 0.002  # of all time: a module without parameters below this is not worth a message
_GLUE = 0.5  # a module that spends more than this outside the modules it calls stays whole


def choose(root: Seen, workers: int) -> list[tuple[Seen, int]]:
    """Units with the place of their worker; fewer than two places are used where the model cannot be cut."""
    total = root.inside_ms
    units = {key: seen for key, seen in root.inside.items() if key != id(root.module)}
    while True:
        splittable = [seen for seen in units.values() if can_split(seen)]
        largest = max(splittable, key=lambda seen: seen.ms, default=None)
        if largest is None or (largest.ms <= total / (_PIECES * workers) and len(units) >= workers):
            break
        units.pop(id(largest.module))
        for key, inner in largest.inside.items():
            units.setdefault(key, inner)
    kept = [seen for seen in units.values() if _is_worth_it(seen, total) and not _is_inside(seen, units)]
    return deal(sorted(kept, key=lambda seen: seen.order), workers)


def can_split(seen: Seen) -> bool:
    """Whether the modules inside can stand for a module."""
    held = {id(p) for one in seen.inside.values() for p in one.module.parameters()}
    return bool(held) and seen.inside_ms >= (1 - _GLUE) * seen.ms


def deal(units: list[Seen], workers: int) -> list[tuple[Seen, int]]:
    """Runs of neighbours to workers, so that the largest sum is the least possible."""
    low, high = max((seen.ms for seen in units), default=0.0), sum(seen.ms for seen in units)
    for _ in range(50):
        middle = (low + high) / 2
        if _runs(units, middle) <= workers:
            high = middle
        else:
            low = middle
    return _dealt(units, workers, high)


def _runs(units: list[Seen], limit: float) -> int:
    count, load = 1, 0.0
    for seen in units:
        if load + seen.ms > limit and load:
            count, load = count + 1, 0.0
        load += seen.ms
    return count


def _dealt(units: list[Seen], workers: int, limit: float) -> list[tuple[Seen, int]]:
    """Fill workers up to the limit; leave at least one unit for each that is still empty."""
    found: list[tuple[Seen, int]] = []
    place, load = 0, 0.0
    for at, seen in enumerate(units):
        full = load + seen.ms > limit * (1 + 1e-9)
        needed = len(units) - at <= workers - 1 - place
        if load and place < workers - 1 and (full or needed):
            place, load = place + 1, 0.0
        found.append((seen, place))
        load += max(seen.ms, 1e-9)
    return found


def _is_worth_it(seen: Seen, total: float) -> bool:
    return seen.ms > _TINY * total or any(True for _ in seen.module.parameters())


def _is_inside(seen: Seen, units: dict[int, Seen]) -> bool:
    """Whether another unit contains this one; the outer one is enough."""
    return any(
        other is not seen and seen.module is not other.module and any(seen.module is m for m in other.module.modules())
        for other in units.values()
    )
