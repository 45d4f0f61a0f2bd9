"""Centres: the seeds of pieces. Each is the heaviest cluster of its share of the work; pieces are cut between two
neighbouring centres where the least crosses.

    clusters   ▂ ▂ █ ▂ ▃ ▂ ▇ ▂ ▂ ▂ █ ▃
    centres        ▲       ▲       ▲
    pieces     ├────────┼────────┼──────┤
"""

from __future__ import annotations

from itertools import pairwise

from gemini.partition.partition_problem import Problem


def cut_pieces(problem: Problem, count: int) -> list[int]:
    """The piece of each cluster, about `count` pieces of consecutive clusters; pins that differ are kept apart."""
    middles = _centres(problem, count)
    crossing = _crossing(problem)
    cuts = {
        min(range(one + 1, other + 1), key=lambda at: (crossing[at], abs(2 * at - one - other - 1)))
        for one, other in pairwise(middles)
    }
    cuts |= _pin_changes(problem)
    piece_of, piece = [], 0
    for at in range(len(problem.items)):
        piece += at in cuts
        piece_of.append(piece)
    return piece_of


def _centres(problem: Problem, count: int) -> list[int]:
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


def _pin_changes(problem: Problem) -> set[int]:
    found = set()
    pin: int | None = None
    for at, item in enumerate(problem.items):
        if item.pin is not None:
            if pin is not None and item.pin != pin:
                found.add(at)
            pin = item.pin
    return found


def _crossing(problem: Problem) -> list[float]:
    """MB of the values made before a position and read at it or after."""
    change = [0.0] * (len(problem.items) + 2)
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        change[producer + 1] += value.mb
        change[max(readers) + 1] -= value.mb
    total, found = 0.0, []
    for amount in change:
        total += amount
        found.append(total)
    return found
