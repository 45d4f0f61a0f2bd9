"""Blocks of the heap model never overlap, are all found again, and cause little fragmentation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini.planner.malloc_model import HeapModel

MB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.001, 40.0)), max_size=120), st.integers(0, 9))
def test_blocks_lie_apart_in_a_heap_that_holds_them(steps: list[tuple[int, float]], seed: int) -> None:
    heap = HeapModel(seed)
    there: dict[int, float] = {}
    for key, mb in steps:
        if key in there:
            heap.free(key)
            del there[key]
        else:
            heap.allocate(key, mb)
            there[key] = mb
        placed = sorted(block for block in heap._blocks.values() if block[0] >= 0)
        gaps = [(start, size) for size, start in heap._gaps]
        ends = lost = 0
        for start, size in sorted([*placed, *gaps]):
            assert start >= ends  # one after the other, and holes are what small blocks have taken
            lost += start - ends
            ends = start + size
        assert lost + heap.size - ends == heap.lost
        assert heap.live == sum(int(mb * MB) for mb in there.values())
    assert heap.most >= heap.most_live or not steps


def test_a_gap_does_not_hold_the_next_block_of_its_size_until_it_has_grown() -> None:
    heap = HeapModel()
    for key in "abc":
        heap.allocate(key, 1.0)
    heap.free("b")
    heap.allocate("d", 1.0)
    assert heap.size == 4 * MB
    heap.free("a")
    heap.allocate("e", 1.0)
    assert heap.size == 4 * MB
