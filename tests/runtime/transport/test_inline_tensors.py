"""Small tensors are sent inside the message and arrive like all others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.tensor_header import INLINE

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = (Link(Channel(end)) for end in Channel.pair())
    yield one, other
    one.close()
    other.close()


def arrived(ends: tuple[Link, Link], value: Any) -> Any:
    ends[0].send(value)  # small enough to wait in the socket
    found = ends[1].receive(20)
    assert found is not None
    return found[0]


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    contents = torch.randint(0, 256, (max(1, math.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        contents %= 2
    return contents.view(dtype)[: math.prod(shape)].view(shape)  # any bits: not-a-number with all its kinds


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return bytes(torch.empty(plain.shape, dtype=plain.dtype).copy_(plain).view(torch.uint8).tolist())


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_small_tensor_arrives_bit_by_bit(ends: tuple[Link, Link], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES + COMPLEX))
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = made(dtype, shape)
    if tensor.dim():
        tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
        at = data.draw(st.integers(0, tensor.dim() - 1))
        tensor = tensor.narrow(at, 0, data.draw(st.integers(0, tensor.shape[at])))
        step = data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * at + (slice(None, None, step),)]
    if dtype.is_complex and data.draw(st.booleans()):
        tensor = data.draw(st.sampled_from([tensor.conj(), tensor.imag, tensor.conj().imag]))  # lazily, all of them
    if (dtype.is_floating_point or dtype.is_complex) and data.draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    found = arrived(ends, [tensor, tensor])
    assert found[0] is found[1]
    assert (found[0].dtype, found[0].shape) == (tensor.dtype, tensor.shape)
    assert found[0].requires_grad == tensor.requires_grad
    assert found[0].is_leaf
    assert bits(found[0]) == bits(tensor)


@pytest.mark.parametrize("bytes_more", [-8, -1, 0, 1, 8])
def test_the_limit_shows_nowhere(ends: tuple[Link, Link], bytes_more: int) -> None:
    tensor = torch.randint(0, 256, (INLINE + bytes_more,), dtype=torch.uint8)
    found = arrived(ends, tensor)
    assert torch.equal(found, tensor)
    assert found.data_ptr() % 64 == 0  # kernels may round differently for other alignments
    found.zero_()
    assert tensor.any()


def test_tensors_that_share_memory_arrive_with_their_own_contents(ends: tuple[Link, Link]) -> None:
    whole = torch.arange(24.0).view(4, 6)
    parts = [whole, whole[1:], whole[:, ::2], whole.t(), whole[0, 0]]
    for one, other in zip(arrived(ends, parts), parts, strict=True):
        assert torch.equal(one, other)


def test_what_is_written_afterwards_does_not_arrive(ends: tuple[Link, Link]) -> None:
    tensor = torch.zeros(10)
    ends[0].send(tensor)
    tensor += 1
    found = ends[1].receive(20)
    assert found is not None
    assert not found[0].any()


def test_special_tensors_arrive(ends: tuple[Link, Link]) -> None:
    parameter = nn.Parameter(torch.randn(3))
    assert torch.equal(arrived(ends, parameter), parameter)
    with torch.inference_mode():
        assert torch.equal(arrived(ends, torch.arange(5)), torch.arange(5))
    assert torch.equal(arrived(ends, torch._efficientzerotensor(4)), torch.zeros(4))
    assert torch.equal(arrived(ends, torch.zeros(3).expand(2, 3)), torch.zeros(2, 3))
    with torch.device("meta"):  # where new tensors are made is the program's affair
        found = arrived(ends, parameter)
    assert found.device.type == "cpu"


def test_calls_of_nothing_but_tensors_are_packed_as_any_other(ends: tuple[Link, Link]) -> None:
    one, other = torch.randn(2), torch.randn(3)
    for value in [((), {}), ((one,), {}), ((one, other), {}), ((one, one), {}), ((one,), {"x": other}), ([one], {})]:
        args, kwargs = arrived(ends, value)
        assert type(args) is type(value[0])
        assert [*map(torch.Tensor.tolist, args)] == [*map(torch.Tensor.tolist, value[0])]
        assert kwargs.keys() == value[1].keys()
        assert len({*map(id, args)}) == len({*map(id, value[0])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, -0.0, 1 / 3, 1e-42, math.inf, -math.inf, math.nan])
def test_single_numbers_arrive_bit_by_bit(ends: tuple[Link, Link], dtype: torch.dtype, value: float) -> None:
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    for sent in (torch.tensor(value, dtype=dtype), torch.tensor(-1, dtype=bits).bitwise_xor(1 << 22).view(dtype)):
        found = arrived(ends, sent)
        assert found.dtype == dtype
        assert found.shape == ()
        assert found.view(bits).item() == sent.view(bits).item()
