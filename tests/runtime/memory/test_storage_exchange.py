"""An exchange of memory moves every tensor on a storage, and frees all memory once."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from gemini.runtime.memory.storage_exchange import can_exchange, exchange

CPU = torch.device("cpu")


class Memory(bytearray):
    """Bytes whose end can be observed."""


def exchange_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    exchange([one.untyped_storage()], [other.untyped_storage()])


def test_the_layout_of_this_torch_is_known() -> None:
    assert can_exchange(CPU)


def test_views_copies_of_data_and_optimizers_move_along() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    aliases = [weight.data, weight.detach().t(), weight.data[1:], weight.view(-1)]
    other = torch.full((6,), 7.0)
    exchange_tensors(weight, other)
    assert all(bool((one == 7).all()) for one in (weight, *aliases))
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with torch.no_grad():
        weight.mul_(2)
    assert all(bool((one == 14).all()) for one in aliases)


def test_memory_is_freed_once_with_its_last_tensor() -> None:
    for _ in range(200):
        memory = Memory(400)
        freed, one, other = weakref.ref(memory), torch.ones(100), torch.frombuffer(memory, dtype=torch.float32)
        del memory
        exchange_tensors(one, other)
        view = one[1:]
        del other, one
        assert freed() is not None
        del view
        assert freed() is None


def test_a_storage_keeps_its_size_and_can_be_resized() -> None:
    one, other = torch.arange(4.0), torch.frombuffer(bytearray(16), dtype=torch.float32)
    exchange_tensors(one, other)
    one.untyped_storage().resize_(64)
    one.resize_(16)
    assert one[:4].tolist() == [0.0] * 4
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]
    empty, nothing = torch.empty(0), torch.empty(0)
    exchange_tensors(empty, nothing)
    assert empty.resize_(3).shape == (3,)


def test_a_saved_or_copied_tensor_is_that_tensor_alone() -> None:
    arena = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    one = nn.Parameter(torch.zeros(4))
    exchange([one.untyped_storage()], [arena[:16].clone().untyped_storage()])
    file = io.BytesIO()
    torch.save(one, file)
    assert file.tell() < 3000
    assert copy.deepcopy(one).data_ptr() != one.data_ptr()


def test_lazy_copies_stay_copies() -> None:
    original, other = torch.zeros(4), torch.ones(4)
    lazy = torch._lazy_clone(original)
    exchange_tensors(lazy, other)
    lazy += 1
    assert (original.tolist(), lazy.tolist(), other.tolist()) == ([0.0] * 4, [2.0] * 4, [0.0] * 4)


def test_inference_tensors_move() -> None:
    with torch.inference_mode():
        one, other = torch.zeros(2), torch.ones(2)
    exchange_tensors(one, other)
    assert one.tolist() == [1.0, 1.0]


def test_storages_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="storages of 8 and 12 bytes"):
        exchange_tensors(torch.zeros(2), torch.zeros(3))
