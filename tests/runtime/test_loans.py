"""Loans: what somebody still looks at is not given back, whoever looks and in whatever way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport.borrowed_buffers import ARE_COUNTED, Loans, Row
from gemini.runtime.transport.shm_pool import Window
from gemini.runtime.transport.tensor_header import Part

pytestmark = pytest.mark.skipif(not ARE_COUNTED, reason="this torch does not tell who looks at a storage")
SLABS = [(0, 256 * at, 256) for at in range(4)]


@pytest.fixture
def loans() -> Loans:
    """On a segment of four slabs."""
    window = Window(Cpu())
    window.segments.append(Cpu().allocate(4096))
    return Loans(window)


def row_of(*slabs: tuple[int, int, int], shape: tuple[int, ...] = (8, 4)) -> Row:
    """A tensor in each slab, and one more on the last."""
    parts = [("part", slab, 256, *Part.like(torch.empty(shape))) for slab in slabs]
    parts.append(("part", slabs[-1], 256, *Part.like(torch.empty(shape), 128)))
    return Row([(0, header) for header in parts])


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
def test_what_is_held_stays(loans: Loans, holder: str) -> None:
    """Of four slabs only the one that somebody holds stays away; it comes back when that is gone."""
    row = row_of(*SLABS)
    for _ in range(3):
        made = loans.read(row)
        assert loans.returned() == []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = HOLDERS[holder](made[1])
        del made
        assert sorted(loans.returned()) == [SLABS[0], *SLABS[2:]]
        assert loans.returned() == []
        del held
        assert loans.returned() == [SLABS[1]]


def test_a_slab_of_two_comes_back_after_both(loans: Loans) -> None:
    """Parts of one slab are counted together."""
    first, second = loans.read(row_of(SLABS[0]))
    del first
    assert loans.returned() == []
    del second
    assert loans.returned() == [SLABS[0]]


def test_contents_are_those_of_the_slab(loans: Loans) -> None:
    """Every reading sees what was written last, also after the program has moved its tensor to other memory."""
    row = row_of(SLABS[2])
    memory = loans.window.segments[0].view(SLABS[2][1], 256).view(torch.float32)
    for value in range(4):
        memory.fill_(value)
        made = loans.read(row)
        assert all(torch.equal(one, torch.full((8, 4), float(value))) for one in made)
        assert all(one._version == 0 and not one._is_view() for one in made)
        made[0].add_(1)
        if value == 1:
            made[0].share_memory_()  # gives the storage other memory
        del made
        assert loans.returned() == [SLABS[2]]


def test_another_layout_in_the_same_slab(loans: Loans) -> None:
    """Slabs are used again for tensors of other shapes and sizes."""
    one, other = row_of(SLABS[0]), row_of(SLABS[0], shape=(4, 8))
    for row, shape in ((one, (8, 4)), (other, (4, 8)), (one, (8, 4))):
        assert [tuple(made.shape) for made in loans.read(row)] == [shape, shape]
        assert loans.returned() == [SLABS[0]]
    smaller = Row([(0, ("part", SLABS[0], 16, *Part.like(torch.empty(4))))])
    assert loans.read(smaller)[0].untyped_storage().nbytes() == 16
    assert loans.returned() == [SLABS[0]]
    assert loans.read(one)[0].untyped_storage().nbytes() == 256


def test_made_in_inference_mode_and_used_outside(loans: Loans) -> None:
    """The first reading may be in any mode."""
    row = row_of(SLABS[0])
    with torch.inference_mode():
        loans.read(row)
    assert not any(one.is_inference() for one in loans.read(row))


def test_slabs_come_back_in_the_order_in_which_they_are_taken_again(loans: Loans) -> None:
    """A pool takes the last one first: so every gradient finds its slab of the step before."""
    loans.read(row_of(*SLABS))
    assert loans.returned() == SLABS[::-1]


def test_what_was_foreseen_is_what_is_read(loans: Loans) -> None:
    """Made ahead for a row, and given back where nobody reads it, or another row is read."""
    row, other = row_of(*SLABS), row_of(*SLABS, shape=(4, 4))
    assert loans.foresee(row) is None  # nothing of it is open
    del loans.read(row)[:]
    foreseen = loans.foresee(row)
    assert foreseen is not None
    assert all(one is ahead for one, ahead in zip(loans.read(row), foreseen, strict=True))
    assert len(loans.read(row)) == len(foreseen)
    foreseen = None
    loans.returned()
    loans.foresee(row)
    made = loans.read(other)
    assert [tuple(one.shape) for one in made] == [(4, 4)] * 5
    del made
    assert sorted(loans.returned()) == SLABS
    loans.read(row)
    loans.foresee(row)
    assert sorted(loans.returned()) == SLABS
