"""Repeats: parts of a sequence whose texts recur after a period, which may be iterations of a loop.

The search compares numbers, one per distinct text. The distances from a place to the next recurrences of its text are
the candidates for the period p; the span of a candidate is where every text is equal to the one p later:

    place    0  1  2  3  4  5  6  7  8  9        candidates at place 1: 3, 6
    text     0  1  2  3  1  2  3  1  2  4
    p = 3       ├────────span────────┤           text[i] == text[i + 3] for i in 1 … 5; the span ends after place 8

A span is the same for all places in it, so it is found once. Each place has few candidates, and the spans of one period
do not overlap: the search takes time in proportion to the length of the sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

_RECURRENCES = 4  # of a text that are candidates for the period


@dataclass(frozen=True)
class Span:
    """Consecutive places whose texts recur after a period; `end` is after the last recurrence."""

    start: int
    end: int
    period: int

    @property
    def turns(self) -> int:
        """The number of whole periods."""
        return (self.end - self.start) // self.period


class Repeats:
    """Finds the spans of a sequence of texts."""

    def __init__(self, texts: Iterable[Hashable]) -> None:
        known: dict[Hashable, int] = {}
        self.numbers = [known.setdefault(text, len(known)) for text in texts]
        self._places: list[list[int]] = [[] for _ in known]
        for at, number in enumerate(self.numbers):
            self._places[number].append(at)
        self._latest: dict[int, Span] = {}  # of every period
        self._lowest = 0

    def spans(self, at: int, lowest: int) -> Iterator[Span]:
        """Yield the spans that contain a place and begin at `lowest` or later, each for the first of its places only.

        Places are passed in ascending order.
        """
        if lowest != self._lowest:
            self._latest, self._lowest = {}, lowest
        for period in self._periods(at):
            known = self._latest.get(period)
            if known is None or at >= known.end - period:
                found = self._latest[period] = self._span(at, period, lowest)
                yield found

    def _periods(self, at: int) -> Iterator[int]:
        places = self._places[self.numbers[at]]
        after = bisect_right(places, at)
        for later in places[after : after + _RECURRENCES]:
            if 2 * (later - at) <= len(self.numbers):
                yield later - at

    def _span(self, at: int, period: int, lowest: int) -> Span:
        start, end, numbers = at, at, self.numbers
        while start > lowest and numbers[start - 1] == numbers[start - 1 + period]:
            start -= 1
        while end + period < len(numbers) and numbers[end] == numbers[end + period]:
            end += 1
        return Span(start, end + period, period)
