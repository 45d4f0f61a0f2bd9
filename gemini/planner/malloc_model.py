"""Malloc model: placement of blocks in the heap of a worker by the C library, and the resulting fragmentation.

A worker retains freed blocks (`gemini.malloc`) for later allocations: a block takes the smallest gap that it fits into,
else the heap grows. So a heap exceeds the peak of memory in use, and more so if block sizes differ. Tensors are
aligned, for which malloc requests a little more than it then uses: the gap of a freed block does not fit the next one
of the same size unless it has been merged with a neighbour. A small remainder of a gap serves small blocks and is lost.
Small live blocks prevent some gaps from merging; which ones is unpredictable, so `seed` selects them at random.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Hashable

_SLACK = 64 + 32  # bytes: requested beyond a block, for its alignment
# One of so many pairs of adjacent gaps has a small live block between them: parts of autograd graphs, of libraries, of
# Python. Found by replaying the blocks of a T5 in two workers: their heaps had grown by 71 and 46 MB
# (in another run by 94 and 45); replayed by 66 and 49, without such places by 54 and 38.
_PINNED = 6
_SMALL = 1032  # bytes: free blocks up to this size are kept in separate bins
_LARGEST = 32 << 20  # bytes: larger blocks are mapped outside the heap, and returned at once
_MB = float(1 << 20)


class HeapModel:
    """A heap with blocks by key."""

    def __init__(self, seed: int = 0) -> None:
        self.size = self.live = self.most_live = self.most = 0  # bytes; `most` includes blocks outside the heap
        self.lost = self._outside = 0
        self._random = random.Random(seed)
        self._blocks: dict[Hashable, tuple[int, int]] = {}
        self._gaps: list[tuple[int, int]] = []  # (size, start), ascending
        self._at: dict[int, int] = {}  # size of the gap that starts somewhere
        self._until: dict[int, int] = {}  # start of the gap that ends somewhere

    def allocate(self, key: Hashable, mb: float) -> None:
        """Allocate a block, unless there is one of this key."""
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

    def free(self, key: Hashable) -> None:
        """Free a block, if there is one of this key."""
        found = self._blocks.pop(key, None)
        if found is None:
            return
        start, size = found
        self.live -= size
        if start < 0:
            self._outside -= size
            return
        end = start + size
        if end in self._at and self._merges():
            end += self._remove(end)
        if start in self._until and self._merges():
            start = self._until[start]
            self._remove(start)
        self._add(start, end - start)

    def _merges(self) -> bool:
        """Return whether two adjacent gaps merge."""
        return self._random.random() * _PINNED >= 1

    def _place(self, size: int) -> int:
        at = bisect_left(self._gaps, (size + _SLACK, 0))
        if at < len(self._gaps):
            gap, start = self._gaps[at]
            self._remove(start)
            self._add(start + size, gap - size)
            return start
        start = self.size
        if self.size in self._until:  # the free block at the end grows
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
