"""Tensors in flight never share memory of the pool, in any order of sends and returns."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import SEGMENT, SharedMemoryPool, Slab

# Small ones, some around the size from which a slab has a segment of its own, and some larger than a segment.
SIZES = st.integers(1, 1 << 20) | st.integers(SEGMENT // 4 - 9, SEGMENT // 4 + 9) | st.integers(SEGMENT, 2 * SEGMENT)
STEPS = st.lists(SIZES | st.tuples(st.integers(0, 99)), max_size=40)  # a size to take, or which slab to give back


def overlap(one: Slab, other: Slab) -> bool:
    """Whether two slabs have a byte in common."""
    ends = one.offset + one.size, other.offset + other.size
    return one.segment == other.segment and one.offset < ends[1] and other.offset < ends[0]


@given(STEPS)
def test_slabs_in_use_never_overlap(steps: list[int | tuple[int]]) -> None:
    pool, used = SharedMemoryPool(Cpu()), []
    for step in steps:
        if isinstance(step, tuple):
            if used:
                pool.release([used.pop(step[0] % len(used))])
            continue
        slab = pool.take(step)
        assert slab.size >= step
        assert slab.offset + slab.size <= pool.segments[slab.segment].size
        assert not any(overlap(slab, other) for other in used)
        used.append(slab)


def test_a_large_tensor_that_comes_first_is_not_written_over() -> None:
    one, other = (Link(Channel(end), side) for side, end in enumerate(Channel.pair()))
    sent = [torch.full((size,), value) for value, size in enumerate((3 << 20, 1 << 16, 3 << 20, 1 << 14), 1)]
    one.send(sent)
    found = other.receive()
    assert found is not None
    for tensor, value in zip(found[0], (1, 2, 3, 4), strict=True):
        assert bool((tensor == value).all())
    one.close()
    other.close()


@given(st.lists(st.integers(1, 1 << 16), min_size=1, max_size=12), st.data())
def test_memory_of_free_slabs_goes_back_and_nothing_else_changes(sizes: list[int], data: st.DataObject) -> None:
    pool, device = SharedMemoryPool(Cpu()), Cpu()
    slabs = [pool.take(size) for size in sizes]
    views = [pool.view(slab, size).fill_(at + 1) for at, (slab, size) in enumerate(zip(slabs, sizes, strict=True))]
    freed = data.draw(st.sets(st.sampled_from(range(len(slabs)))))
    pool.release([slabs[at] for at in freed])
    pool.trim()
    device.rest()
    for at, view in enumerate(views):
        if at not in freed:
            assert bool((view == at + 1).all())
    again = [pool.take(sizes[at]) for at in freed]
    for slab in again:
        pool.view(slab, slab.size).fill_(77)
    for at, view in enumerate(views):
        if at not in freed:
            assert bool((view == at + 1).all())


def test_without_the_other_end_memory_goes_with_its_last_tensor() -> None:
    here, there = (Link(Channel(end), side) for side, end in enumerate(Channel.pair()))
    here.send(torch.arange(1 << 15))
    found = there.receive()
    assert found is not None
    for link in (here, there):
        link.transport.forget()
        assert not link.transport.buffers[0].pool.segments
        assert not link.transport.buffers[0].mapped.segments
    assert torch.equal(found[0], torch.arange(1 << 15))
