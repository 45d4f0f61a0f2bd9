"""Offsets for blocks that occupy several devices at once, fixed before anything else is placed.

Such blocks cut the circles of all their devices at the same place. Put side by side they leave one gap, into which
every device can pack the rest of its work:

    device 0   [E][H] F0 . B0 …          E, H: embedding and head over all devices
    device 1   [E][H] F1 B1 .  …
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from gemini.schedule.placement_problem import PlacementProblem
from gemini.schedule.search.modulo_table import can_pack

_ALL_ORDERS_UP_TO = 4
_RANDOM_ORDERS = 6


def reservations(problem: PlacementProblem, length: int, seed: int) -> Iterator[dict[int, int]]:
    """Candidate reservations of offsets, most promising first; the last one fixes nothing."""
    wide = [block for block in problem.topological if len(problem.devices[block]) > 1]
    if wide:
        seen = set()
        for order in _orders(wide, seed):
            offsets = _side_by_side(problem, order, length)
            if offsets is not None and tuple(sorted(offsets.items())) not in seen:
                seen.add(tuple(sorted(offsets.items())))
                yield offsets
    yield {}


def _orders(blocks: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    if len(blocks) <= _ALL_ORDERS_UP_TO:
        yield from itertools.permutations(blocks)
        return
    yield blocks
    yield list(reversed(blocks))
    chance = random.Random(seed)
    for _ in range(_RANDOM_ORDERS):
        yield chance.sample(list(blocks), len(blocks))


def _side_by_side(problem: PlacementProblem, order: Sequence[int], length: int) -> dict[int, int] | None:
    """Each block right after the one before it on its devices; None where the rest of a device does not fit."""
    free = [0] * problem.ndevs
    offsets = {}
    idle: list[list[int]] = [[] for _ in range(problem.ndevs)]
    for block in order:
        offset = max(free[dev] for dev in problem.devices[block])
        offsets[block] = offset
        for dev in problem.devices[block]:
            idle[dev].append(offset - free[dev])
            free[dev] = offset + problem.span[block]
    if max(free) > length:
        return None
    for dev, blocks in enumerate(problem.on_device):
        rest = tuple(sorted((problem.span[b] for b in blocks if b not in offsets), reverse=True))
        gaps = tuple(sorted(size for size in (*idle[dev], length - free[dev]) if size))
        if not can_pack(gaps, rest):
            return None
    return offsets
