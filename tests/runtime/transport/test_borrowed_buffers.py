"""A borrowed buffer is returned only after its last reference is gone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport.borrowed_buffers import ARE_COUNTED, BorrowedBuffers, BufferGroup
from gemini.runtime.transport.shm_pool import MappedPool
from gemini.runtime.transport.tensor_header import TensorPart, read_part

pytestmark = pytest.mark.skipif(not ARE_COUNTED, reason="this torch does not tell who looks at a storage")
SLABS = [(0, 256 * at, 256) for at in range(4)]


@pytest.fixture
def borrowed() -> BorrowedBuffers:
    """On a segment of four slabs."""
    window = MappedPool(Cpu())
    window.segments.append(Cpu().allocate(4096))
    return BorrowedBuffers(window)


def row_of(*slabs: tuple[int, int, int], shape: tuple[int, ...] = (8, 4)) -> BufferGroup:
    """A tensor in each slab, and one more on the last."""
    parts = [("part", slab, 256, *TensorPart.like(torch.empty(shape))) for slab in slabs]
    parts.append(("part", slabs[-1], 256, *TensorPart.like(torch.empty(shape), 128)))
    return BufferGroup([(0, header) for header in parts])


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda one: one,
    "a view": lambda one: one[1:, 2],
    "a detached one": lambda one: one.detach(),
    "numpy": lambda one: one.numpy(),
    "its storage": lambda one: one.untyped_storage(),
    "its typed storage": lambda one: one.storage(),
    "a graph": lambda one: (torch.ones(8, 4, requires_grad=True) * one).sum(),
    "a parameter": torch.nn.Parameter,
    "dlpack": torch.from_dlpack,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_stays(borrowed: BorrowedBuffers, holder: str) -> None:
    """Of four slabs only the one that somebody holds stays away; it comes back when that is gone."""
    row = row_of(*SLABS)
    for _ in range(3):
        made = borrowed.read(row)
        assert borrowed.collect_idle() == []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = HOLDERS[holder](made[1])
        del made
        assert sorted(borrowed.collect_idle()) == [SLABS[0], *SLABS[2:]]
        assert borrowed.collect_idle() == []
        del held
        assert borrowed.collect_idle() == [SLABS[1]]


def test_a_slab_of_two_comes_back_after_both(borrowed: BorrowedBuffers) -> None:
    """Parts of one slab are counted together."""
    first, second = borrowed.read(row_of(SLABS[0]))
    del first
    assert borrowed.collect_idle() == []
    del second
    assert borrowed.collect_idle() == [SLABS[0]]


def test_each_tensor_has_a_storage_of_its_own_size(borrowed: BorrowedBuffers) -> None:
    """A file with one of them holds nothing else, and safetensors accepts all of them together."""
    row = row_of(*SLABS)
    for _ in range(2):  # opened, and read again
        storages = [one.untyped_storage() for one in borrowed.read(row)]
        assert {storage.nbytes() for storage in storages} == {8 * 4 * 4}
        assert len({storage.data_ptr() for storage in storages}) == len(storages)


def test_parts_without_counts_release_their_slab_after_the_last(borrowed: BorrowedBuffers) -> None:
    """Of other devices than the CPU."""
    mapped, opened = borrowed.mapped, dict[Any, torch.Tensor]()
    first, second = (read_part(mapped, header, opened) for _, header in row_of(SLABS[0]).headers)
    opened.clear()
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 128
    del first
    assert mapped.pop_released() == []
    del second
    assert mapped.pop_released() == [SLABS[0]]


def test_contents_are_those_of_the_slab(borrowed: BorrowedBuffers) -> None:
    """Every reading sees what was written last, also after the program has moved its tensor to other memory."""
    row = row_of(SLABS[2])
    memory = borrowed.mapped.segments[0].view(SLABS[2][1], 256).view(torch.float32)
    for value in range(4):
        memory.fill_(value)
        made = borrowed.read(row)
        assert all(torch.equal(one, torch.full((8, 4), float(value))) for one in made)
        assert all(one._version == 0 and not one._is_view() for one in made)
        made[0].add_(1)
        if value == 1:
            made[0].share_memory_()  # gives the storage other memory
        del made
        assert borrowed.collect_idle() == [SLABS[2]]


def test_another_layout_in_the_same_slab(borrowed: BorrowedBuffers) -> None:
    """Slabs are used again for tensors of other shapes and sizes."""
    one, other = row_of(SLABS[0]), row_of(SLABS[0], shape=(4, 8))
    for row, shape in ((one, (8, 4)), (other, (4, 8)), (one, (8, 4))):
        assert [tuple(made.shape) for made in borrowed.read(row)] == [shape, shape]
        assert borrowed.collect_idle() == [SLABS[0]]
    smaller = BufferGroup([(0, ("part", SLABS[0], 16, *TensorPart.like(torch.empty(4))))])
    assert borrowed.read(smaller)[0].untyped_storage().nbytes() == 16
    assert borrowed.collect_idle() == [SLABS[0]]
    assert borrowed.read(one)[0].untyped_storage().nbytes() == 128


def test_made_in_inference_mode_and_used_outside(borrowed: BorrowedBuffers) -> None:
    """The first reading may be in any mode."""
    row = row_of(SLABS[0])
    with torch.inference_mode():
        borrowed.read(row)
    assert not any(one.is_inference() for one in borrowed.read(row))


def test_slabs_come_back_in_the_order_in_which_they_are_taken_again(borrowed: BorrowedBuffers) -> None:
    """A pool takes the last one first: so every gradient finds its slab of the step before."""
    borrowed.read(row_of(*SLABS))
    assert borrowed.collect_idle() == SLABS[::-1]


def test_what_was_foreseen_is_what_is_read(borrowed: BorrowedBuffers) -> None:
    """Made ahead for a row, and given back where nobody reads it, or another row is read."""
    row, other = row_of(*SLABS), row_of(*SLABS, shape=(4, 4))
    assert borrowed.prepare(row) is None  # nothing of it is open
    del borrowed.read(row)[:]
    foreseen = borrowed.prepare(row)
    assert foreseen is not None
    assert all(one is ahead for one, ahead in zip(borrowed.read(row), foreseen, strict=True))
    assert len(borrowed.read(row)) == len(foreseen)
    foreseen = None
    borrowed.collect_idle()
    borrowed.prepare(row)
    made = borrowed.read(other)
    assert [tuple(one.shape) for one in made] == [(4, 4)] * 5
    del made
    assert sorted(borrowed.collect_idle()) == SLABS
    borrowed.read(row)
    borrowed.prepare(row)
    assert sorted(borrowed.collect_idle()) == SLABS
