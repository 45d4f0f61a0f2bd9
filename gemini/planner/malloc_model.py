"""The heap of a worker: where the C library puts blocks, and what lies idle between them.

Freed blocks stay with a worker (`gemini.malloc`) and serve later ones, but only in one piece: a block takes the
smallest gap that it fits into, else the heap grows. So a heap is larger than all that was ever in use at once, the more
the more the blocks differ in size. Tensors are aligned, for which the C library wants a little more than it then takes:
a gap that a block has left does not hold the next one of the same size unless it has grown together with another. What
is left over of a gap goes to small blocks, where it is small, and does not come back. Small blocks that live on keep
some gaps apart; which ones, nobody knows, so heaps of one and the same plan differ: `seed` stands for that.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Hashable

_SLACK = 64 + 32  # bytes: what is asked for beyond a block, to align it
# Of so many places where two gaps meet, one has a small block between them that lives on: parts of autograd's graphs,
# of libraries, of Python. Found by replaying the blocks of a T5 in two workers: their heaps had grown by 71 and 46 MB
# (in another run by 94 and 45); replayed by 66 and 49, without such places by 54 and 38.
_PINNED = 6
_SMALL = 1032  # bytes: the C library keeps free blocks up to this size apart, for the next who wants one
_LARGEST = 32 << 20  # bytes: larger ones do not come from the heap, and go back at once
_MB = float(1 << 20)


class HeapModel:
    """Blocks by key."""

    def __init__(self, seed: int = 0) -> None:
        self.size = self.live = self.most_live = self.most = 0  # bytes; `most` of both the heap and what is outside it
        self.lost = self._outside = 0
        self._random = random.Random(seed)
        self._blocks: dict[Hashable, tuple[int, int]] = {}
        self._gaps: list[tuple[int, int]] = []  # (size, start), ascending
        self._at: dict[int, int] = {}  # size of the gap that starts somewhere
        self._until: dict[int, int] = {}  # start of the gap that ends somewhere

    def take(self, key: Hashable, mb: float) -> None:
        """Place a block; one that is there already stays."""
        size = int(mb * _MB)
        if key in self._blocks or size <= 0:
            return
        self.live += size
        self.most_live = max(self.most_live, self.live)
        start = -1
        if size > _LARGEST:
            self._outside += size
        else:
            start = self._place(size)
        self._blocks[key] = start, size
        self.most = max(self.most, self.size + self._outside)

    def give(self, key: Hashable) -> None:
        """Free a block, if it is there."""
        found = self._blocks.pop(key, None)
        if found is None:
            return
        start, size = found
        self.live -= size
        if start < 0:
            self._outside -= size
            return
        end = start + size
        if end in self._at and self._joins():
            end += self._remove(end)
        if start in self._until and self._joins():
            start = self._until[start]
            self._remove(start)
        self._add(start, end - start)

    def _joins(self) -> bool:
        """Whether two gaps side by side become one."""
        return self._random.random() * _PINNED >= 1

    def _place(self, size: int) -> int:
        at = bisect_left(self._gaps, (size + _SLACK, 0))
        if at < len(self._gaps):
            gap, start = self._gaps[at]
            self._remove(start)
            self._add(start + size, gap - size)
            return start
        start = self.size
        if self.size in self._until:  # what is free at the end grows
            start = self._until[self.size]
            self._remove(start)
        self.size = max(self.size, start + size)
        return start

    def _add(self, start: int, size: int) -> None:
        if size > _SMALL:
            insort(self._gaps, (size, start))
            self._at[start], self._until[start + size] = size, start
        else:
            self.lost += size

    def _remove(self, start: int) -> int:
        size = self._at.pop(start)
        del self._until[start + size]
        self._gaps.pop(bisect_left(self._gaps, (size, start)))
        return size
