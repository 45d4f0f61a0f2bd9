"""Room on circles: where a block may still go on devices whose steady state repeats after `length`.

    length = 8         0   1   2   3   4   5   6   7
    occupied (0,1)(4,3) [F]             [B          ]
    gaps                    1 ──── 3                  7 ─ 1

A block is only placed where all remaining blocks of the same device fit into the remaining gaps. This look-ahead
lets a search fill circles without any idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Occupied = tuple[tuple[int, int], ...]
"""(offset, span) of the blocks on a circle, by offset."""

_EXACT_UP_TO = 8
_ALL_SUMS_UP_TO = 5
_EVERY_OFFSET_UP_TO = 32


def occupy(occupied: Occupied, offset: int, span: int) -> Occupied:
    """The circle with one more block on it."""
    return tuple(sorted((*occupied, (offset, span))))


def gaps(occupied: Occupied, length: int) -> list[tuple[int, int]]:
    """(offset, size) of the free stretches; an empty circle is one stretch from 0."""
    if not occupied:
        return [(0, length)]
    found = []
    following = [*occupied[1:], (occupied[0][0] + length, 0)]
    for (offset, span), (after, _) in zip(occupied, following):
        if after > offset + span:
            found.append(((offset + span) % length, after - offset - span))
    return found


@dataclass(frozen=True)
class Wish:
    """When a block should start: no earlier than `low`, as early as it goes; else no later than `high`, as late."""

    low: int | None
    high: int | None

    def time(self, offset: int, length: int) -> tuple[int, int] | None:
        """(distance from the desired time, time) of the closest time at this offset; None where it is out of bounds."""
        if self.low is not None:
            time = self.low + (offset - self.low) % length
            return (time - self.low, time) if self.high is None or time <= self.high else None
        if self.high is not None:
            time = self.high - (self.high - offset) % length
            return (self.high - time, time)
        return (0, offset)


@dataclass(frozen=True)
class Room:
    """A circle: its placed blocks, and the spans of the remaining blocks (descending)."""

    occupied: Occupied
    rest: tuple[int, ...]
    length: int

    def offsets(self, stretches: list[tuple[int, int]], span: int, wish: Wish) -> set[int]:
        """Offsets to try: the desired one, and those that leave whole sums of later spans on one side."""
        length = self.length
        wishes = [time % length for time in (wish.low, wish.high) if time is not None]
        if not self.occupied:
            return set(wishes) or {0}
        found: set[int] = set()
        sums = _sums(self.rest)
        for begin, size in stretches:
            spare = size - span
            if spare < 0:
                continue
            if length <= _EVERY_OFFSET_UP_TO:
                found.update((begin + amount) % length for amount in range(spare + 1))
                continue
            found.update(offset for offset in wishes if (offset - begin) % length <= spare)
            for amount in sums:
                if amount <= spare:
                    found.add((begin + amount) % length)
                    found.add((begin + spare - amount) % length)
        return found

    def admits(self, stretches: list[tuple[int, int]], span: int, offset: int) -> bool:
        """Whether a block is free to go to `offset` and the remaining blocks fit beside it."""
        length, rest = self.length, self.rest
        if not self.occupied:
            return span <= length and (not rest or can_pack((length - span,), rest))
        for index, (begin, size) in enumerate(stretches):
            before = (offset - begin) % length
            if before + span <= size:
                if not rest:
                    return True
                others = [other for place, (_, other) in enumerate(stretches) if place != index]
                sizes = sorted(part for part in (*others, before, size - span - before) if part >= rest[-1])
                return can_pack(tuple(sizes), rest)
        return False


def positions(rooms: Sequence[Room], span: int, wish: Wish, limit: int) -> list[tuple[int, int]]:
    """Up to `limit` (distance from the desired time, time) for a block on these circles at once, closest first."""
    free = [gaps(room.occupied, room.length) for room in rooms]
    offsets: set[int] = set()
    for room, stretches in zip(rooms, free):
        offsets |= room.offsets(stretches, span, wish)
    length = rooms[0].length
    timed = sorted(found for found in (wish.time(offset, length) for offset in offsets) if found is not None)
    chosen = []
    for distance, time in timed:
        if all(room.admits(stretches, span, time % length) for room, stretches in zip(rooms, free)):
            chosen.append((distance, time))
            if len(chosen) == limit:
                break
    return chosen


@lru_cache(maxsize=65536)
def _sums(spans: tuple[int, ...]) -> frozenset[int]:
    """Sums of subsets of these spans (only single spans if there are many)."""
    if len(spans) > _ALL_SUMS_UP_TO:
        return frozenset({0, *spans})
    sums = {0}
    for span in spans:
        sums |= {amount + span for amount in sums}
    return frozenset(sums)


@lru_cache(maxsize=262144)
def can_pack(sizes: tuple[int, ...], spans: tuple[int, ...]) -> bool:
    """Whether blocks of these spans (descending) fit into gaps of these sizes (ascending).

    Exact for up to eight spans. Beyond that first-fit must succeed or the total must suffice: an optimistic answer,
    which the search corrects later.
    """
    if not spans:
        return True
    if sum(sizes) < sum(spans) or not sizes or sizes[-1] < spans[0]:
        return False
    if _first_fit(sizes, spans) or len(spans) > _EXACT_UP_TO:
        return True
    tried = set()
    for index, size in enumerate(sizes):
        if size >= spans[0] and size not in tried:
            tried.add(size)
            rest = (*sizes[:index], *sizes[index + 1 :], size - spans[0])
            if can_pack(tuple(sorted(part for part in rest if part >= spans[-1])), spans[1:]):
                return True
    return False


def _first_fit(sizes: tuple[int, ...], spans: tuple[int, ...]) -> bool:
    left = list(sizes)
    for span in spans:
        for index, size in enumerate(left):
            if size >= span:
                left[index] -= span
                break
        else:
            return False
    return True
