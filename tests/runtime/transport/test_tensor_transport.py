"""Values arrive unchanged, and their memory is returned."""

from __future__ import annotations

import operator
import os
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import SEGMENT, round_size
from gemini.runtime.transport.tensor_header import UnsendableTensor


@dataclass
class Answer:
    """A class of the program's own."""

    value: Any
    count: int


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = (Link(Channel(end)) for end in Channel.pair())
    yield one, other
    one.close()
    other.close()


def arrived(ends: tuple[Link, Link], value: Any) -> Any:
    sender = threading.Thread(target=ends[0].send, args=(value,))
    sender.start()
    found = ends[1].receive()
    sender.join()
    assert found is not None
    return found[0]


TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "large": torch.randn(300, 400),
    "transposed": torch.randn(30, 40).t(),
    "channels last": torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last),
    "strided": torch.randn(60, 40)[::2, ::3],
    "expanded": torch.randn(4, 1).expand(4, 600),
    "a part": torch.randn(4, 8, 9, 9)[:, :4],
    "a large part, channels last": torch.randn(4, 64, 9, 9).to(memory_format=torch.channels_last)[:, 3:40],
    "expanded and transposed": torch.randn(40, 1, 70).expand(40, 5, 70).transpose(0, 2),
    "all one": torch.tensor(2.0).expand(60, 70),
    "every second": torch.randn(6000)[1::2],
    "overlapping": torch.randn(900).unfold(0, 300, 2),
    "mostly gaps": torch.randn(300, 400)[:, 7:9],
    "gaps, channels last": torch.randn(4, 84, 32)[:, :16].unflatten(1, (4, 4)).permute(0, 3, 1, 2),
    "gaps, large and repeated": torch.randn(300, 1, 400)[:, :, :50].expand(300, 7, 50),
    "one channel, last": torch.randn(2, 1, 8, 9).as_strided((2, 1, 8, 9), (72, 1, 9, 1)),
    "one pixel, channels last": torch.randn(2, 3000, 1, 1).as_strided((2, 3000, 1, 1), (3000, 1, 3000, 3000)),
    "boolean": torch.ones(5000, dtype=torch.bool),
    "bfloat16": torch.randn(700, 4).bfloat16(),
    "complex": torch.randn(700, dtype=torch.cfloat).conj(),
    "negative": torch.randn(700, dtype=torch.cfloat).conj().imag,
    "integers": torch.arange(9),
    "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str, ends: tuple[Link, Link]) -> None:
    tensor = TENSORS[name]
    found = arrived(ends, {"x": [tensor, None]})["x"][0]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if tensor.layout is torch.strided and name != "overlapping":
        assert found.stride() == tensor.stride()


def test_gradients_are_asked_for_as_before(ends: tuple[Link, Link]) -> None:
    found = arrived(ends, torch.randn(2000, requires_grad=True))
    assert found.requires_grad
    assert found.is_leaf


def test_the_same_tensor_twice_is_one(ends: tuple[Link, Link]) -> None:
    tensor = torch.randn(500)
    one, other = arrived(ends, (tensor, tensor))
    assert one is other


def test_classes_and_functions_of_the_program_come_home(ends: tuple[Link, Link]) -> None:
    there = arrived(ends, Answer(torch.randn(3), 4))
    back = arrived((ends[1], ends[0]), there)
    assert type(back) is Answer
    assert arrived(ends, lambda x: x + 1)(2) == 3


def test_code_of_the_program_may_use_modules_that_are_objects(ends: tuple[Link, Link]) -> None:
    def chosen() -> str:
        return "mps" if torch.backends.mps.is_available() and torch.backends.mkldnn.enabled else "cpu"

    chosen.__module__ = "__main__"
    assert type(torch.backends) is not types.ModuleType
    assert arrived(ends, chosen)() == chosen()
    assert arrived(ends, (lambda x: x, torch.backends.mkldnn))[1] is torch.backends.mkldnn


def test_names_that_python_keeps_once_stay_so(ends: tuple[Link, Link]) -> None:
    def branch(kind: str, other: str = "other_branch") -> tuple[bool, bool]:
        return operator.is_(kind, "some_branch"), operator.is_(other, "other_branch")

    sent = arrived(ends, {"kinds": [("some_branch", 3)], "branch": branch})
    assert sent["branch"](sent["kinds"][0][0]) == (True, True)


def test_classes_go_by_the_name_that_their_package_has_them_under(ends: tuple[Link, Link]) -> None:
    assert not hasattr(torch.nn.attention, SDPBackend.__qualname__)
    assert arrived(ends, [SDPBackend.MATH, SDPBackend]) == [SDPBackend.MATH, SDPBackend]


def _doubled(self: Answer) -> Any:
    return self.value * 2


def test_functions_bound_to_one_object_stay_bound(ends: tuple[Link, Link]) -> None:
    answer = Answer(4, 1)
    answer.twice = types.MethodType(_doubled, answer)  # type: ignore[attr-defined]
    answer.value_of = answer.__eq__  # type: ignore[attr-defined]
    found = arrived(ends, [answer, answer.twice, torch.Size.numel])[0]  # type: ignore[attr-defined]
    assert found.twice() == 8
    assert found.twice.__self__ is found
    assert found.value_of(found)


def test_memory_is_used_again_once_the_receiver_is_done(ends: tuple[Link, Link]) -> None:
    for _ in range(20):
        found = arrived(ends, torch.randn(1 << 20))
        del found
        arrived((ends[1], ends[0]), None)  # the news travel with the next message
    assert ends[0].transport.buffers[0].pool.size <= SEGMENT


def test_memory_is_kept_while_a_view_lives(ends: tuple[Link, Link]) -> None:
    view = arrived(ends, torch.arange(100_000))[50_000:]
    arrived((ends[1], ends[0]), None)
    arrived(ends, torch.zeros(100_000, dtype=torch.long))
    assert view[0] == 50_000


def test_what_cannot_cross_says_so(ends: tuple[Link, Link]) -> None:
    with pytest.raises(UnsendableTensor, match="sparse_csr"):
        ends[0].send(torch.eye(3).to_sparse_csr())


def test_what_cannot_cross_holds_up_nothing_else(ends: tuple[Link, Link]) -> None:
    class Holds:
        own = threading.local()

    with pytest.raises(TypeError, match=r"_thread\._local"):
        ends[0].send([Holds, Holds.own])
    ends[0].send("another")
    assert ends[1].receive() == ("another", [])


def test_a_closed_end_is_noticed(ends: tuple[Link, Link]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed):
        ends[0].receive()
    with pytest.raises(ChannelClosed):
        ends[0].send("x" * 1_000_000)


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(size: int) -> None:
    assert size <= round_size(size) <= max(64, size + 63, 1.25 * size)
    assert round_size(round_size(size)) == round_size(size)


def test_frames_that_are_held_come_when_they_are_let_go() -> None:
    """In their order, and not after one that has descriptors, which does not wait."""
    one, other = (Channel(end) for end in Channel.pair())
    assert other.receive(0) is None
    one.cork()
    one.send(b"first")
    one.send(b"second")
    assert other.receive(0) is None
    with open(os.devnull, "rb") as file:
        one.send(b"third", (file.fileno(),))
    found = [other.receive(0) for _ in range(3)]
    assert [body for body, _ in found if body] == [b"first", b"second", b"third"]
    for descriptor in found[2][1]:
        os.close(descriptor)
    one.send(b"fourth")
    assert other.receive(0) is None
    one.uncork()
    one.send(b"fifth")
    assert [other.receive(0)[0] for _ in range(2)] == [b"fourth", b"fifth"]
    one.close()
    with pytest.raises(ChannelClosed):
        other.receive(0)
    other.close()
