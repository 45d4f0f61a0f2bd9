"""Name spans: which variable names are free, in one sweep over a program.

Names are assigned in the order in which variables are first set. A name is blocked while its contents are needed, and
free in between. A variable may have its preferred name, or that with a number; the names of such a family wait in a
queue until their contents are dead, so that a variable inspects only names that may be free:

    position    0    4    8    12   16
    output      ├─────────┤    ├────    free at 8
    output_2         ├─────────────     blocked until its end
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence

Span = Sequence[int]  # (set, last read)


class NameSpans:
    """The spans of one name, by their beginning."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._ends: list[int] = []  # the last end of a span and all before it

    def add(self, spans: Sequence[Span]) -> None:
        """Add the spans of a variable that has this name."""
        for begin, end in spans:
            at = bisect_left(self.spans, (begin, end))
            insort(self.spans, (begin, end))
            del self._ends[at:]
            for _, later in self.spans[at:]:
                self._ends.append(max(later, self._ends[-1]) if self._ends else later)

    def has_overlap(self, spans: Sequence[Span]) -> bool:
        """Return whether a variable with these spans cannot have the name."""
        for begin, end in spans:
            at = bisect_left(self.spans, (begin,))
            if at < len(self.spans) and self.spans[at][0] == begin:
                return True
            before = bisect_left(self.spans, (end,))
            if before and self._ends[before - 1] > begin:
                return True
        return False

    def blocked_until(self, position: int) -> int:
        """Return the end of the contents at a position; the position itself if they are not needed there."""
        before = bisect_right(self.spans, position, key=lambda span: span[0])
        return max(position, self._ends[before - 1]) if before else position

    def latest(self, position: int) -> tuple[int, int] | None:
        """Return the latest span that begins before a position."""
        before = bisect_left(self.spans, (position,))
        return self.spans[before - 1] if before else None

    def begins_in(self, start: int, end: int) -> bool:
        """Return whether a span begins at `start` or later, before `end`."""
        at = bisect_left(self.spans, (start,))
        return at < len(self.spans) and self.spans[at][0] < end


class _Family:
    """The names made of one preferred name that variables have: 1 is the name itself, others have their number."""

    def __init__(self) -> None:
        self.count = 0
        self.free: list[int] = []  # heap of numbers that may be free
        self.blocked: list[tuple[int, int]] = []  # heap of (end of the contents, number)

    def release(self, position: int) -> None:
        """Move names whose contents are dead at a position to the free ones."""
        while self.blocked and self.blocked[0][0] <= position:
            heapq.heappush(self.free, heapq.heappop(self.blocked)[1])


class NameAllocator:
    """Assigns names to variables, in the order in which they are first set."""

    def __init__(self, reserved: Collection[str]) -> None:
        self.reserved = reserved
        self.spans: dict[str, NameSpans] = {}
        self._families: dict[str, _Family] = {}

    def add(self, name: str, spans: Sequence[Span]) -> None:
        """Add a variable whose name is fixed."""
        self.spans.setdefault(name, NameSpans()).add(spans)

    def assign(self, wanted: str, spans: Sequence[Span]) -> str:
        """Return the first name of the family of `wanted` that is free in all spans, and block it in them."""
        family, start = self._families.setdefault(wanted, _Family()), spans[0][0]
        family.release(start)
        passed: list[int] = []
        while True:
            if family.free:
                number = heapq.heappop(family.free)
            else:
                family.count += 1
                number = family.count
            name = wanted if number == 1 else f"{wanted}_{number}"
            if name in self.reserved:
                continue
            blocked = self.spans.setdefault(name, NameSpans())
            is_free = not blocked.has_overlap(spans)
            if is_free:
                blocked.add(spans)
            until = blocked.blocked_until(start)
            if until > start:
                heapq.heappush(family.blocked, (until, number))
            else:
                passed.append(number)
            if is_free:
                break
        for number in passed:
            heapq.heappush(family.free, number)
        return name
