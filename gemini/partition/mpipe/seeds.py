"""Seeds of pieces: the heaviest cluster of each equal share of the work. Pieces are cut between adjacent seeds where
the fewest bytes cross.

    clusters   ▂ ▂ █ ▂ ▃ ▂ ▇ ▂ ▂ ▂ █ ▃
    seeds          ▲       ▲       ▲
    pieces     ├────────┼────────┼──────┤
"""

from __future__ import annotations

from itertools import pairwise

from gemini.partition.partition_problem import Problem


def cut_pieces(problem: Problem, count: int) -> list[int]:
    """Return the piece of each cluster, about `count` pieces of consecutive clusters; different pins are separated."""
    seeds = _find_seeds(problem, count)
    crossing = _crossing_mb(problem)
    cuts = {
        min(range(one + 1, other + 1), key=lambda at: (crossing[at], abs(2 * at - one - other - 1)))
        for one, other in pairwise(seeds)
    }
    cuts |= _find_pin_changes(problem)
    piece_of, piece = [], 0
    for at in range(len(problem.items)):
        piece += at in cuts
        piece_of.append(piece)
    return piece_of


def _find_seeds(problem: Problem, count: int) -> list[int]:
    total = sum(item.ms for item in problem.items)
    if not total:
        return list(range(len(problem.items)))[:count]
    heaviest: dict[int, int] = {}
    done = 0.0
    for at, item in enumerate(problem.items):
        share = min(count - 1, int((done + item.ms / 2) / total * count))
        done += item.ms
        if share not in heaviest or item.ms > problem.items[heaviest[share]].ms:
            heaviest[share] = at
    return sorted(heaviest.values())


def _find_pin_changes(problem: Problem) -> set[int]:
    found = set()
    pin: int | None = None
    for at, item in enumerate(problem.items):
        if item.pin is not None:
            if pin is not None and item.pin != pin:
                found.add(at)
            pin = item.pin
    return found


def _crossing_mb(problem: Problem) -> list[float]:
    """Return, per position, the MB of values produced before it and read at or after it."""
    change = [0.0] * (len(problem.items) + 2)
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        change[producer + 1] += value.mb
        change[max(readers) + 1] -= value.mb
    total, found = 0.0, []
    for amount in change:
        total += amount
        found.append(total)
    return found
