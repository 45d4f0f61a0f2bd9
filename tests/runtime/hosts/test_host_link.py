"""The link between hosts transfers like any other, by torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.hosts.code_versions import version_differences
from gemini.runtime.memory.replica_sync import ReplicaSync, build_replica
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.dist_p2p import P2PChannel, choose_backend
from gemini.runtime.transport.gloo_channel import GlooChannel
from gemini.runtime.transport.gloo_pair import FRAMES, GlooPair, MeetingPoint
from gemini.runtime.transport.remote_link import RemoteLink, ThreadedRemoteLink
from tests.runtime.transport.test_tensor_transport import TENSORS

KEY = b"the key of this run"


def connected(name: str) -> tuple[GlooPair, GlooPair]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))

    def join(side: int) -> GlooPair:
        return GlooPair(MeetingPoint("127.0.0.1", store.port, name).join(20.0), side, "127.0.0.1", 20.0)

    one, other = both(lambda: join(0), lambda: join(1))
    return one, other


def both(one: Any, other: Any) -> list[Any]:
    """What two functions that wait for each other return, or raise."""
    found: list[Any] = [None, None]

    def run(at: int, work: Any) -> None:
        try:
            found[at] = work()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[RemoteLink, RemoteLink]]:
    pairs = connected("ends")
    channels = [GlooChannel(pair, KEY) for pair in pairs]
    made = [RemoteLink(one, P2PChannel(one, pair), pair.side) for one, pair in zip(channels, pairs, strict=True)]
    yield made[0], made[1]
    for link in made:
        link.close()


def crossed(one: RemoteLink, other: RemoteLink, value: Any) -> Any:
    sent, found = both(lambda: one.send(value), lambda: other.receive(20))
    assert sent is True
    return found[0]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str, ends: tuple[RemoteLink, RemoteLink]) -> None:
    tensor = TENSORS[name]
    for one, other in (ends, ends[::-1]):
        found = crossed(one, other, {"x": [tensor, None]})["x"][0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.to_dense(), tensor.to_dense())


def test_tensors_arrive_in_their_order_both_ways_at_once(ends: tuple[RemoteLink, RemoteLink]) -> None:
    sizes = [70_000, 3, 0, 5_000, 90_000, 20_000]
    values = [[torch.full((size,), float(at)) for at, size in enumerate(sizes)] for _ in range(20)]

    def talk(link: RemoteLink) -> list[Any]:
        """Send from one thread while another one receives, as a controller with micro-batches does."""
        sender = threading.Thread(target=lambda: [link.send(value) for value in values])
        sender.start()
        found = [link.receive(20) for _ in values]
        sender.join(20)
        return [one[0] for one in found if one is not None]

    for heard in both(lambda: talk(ends[0]), lambda: talk(ends[1])):
        assert all(torch.equal(a, b) for x, y in zip(heard, values, strict=True) for a, b in zip(x, y, strict=True))


def test_nothing_arrives_in_time(ends: tuple[RemoteLink, RemoteLink]) -> None:
    assert ends[0].receive(0.01) is None


def test_descriptors_do_not_cross_hosts(ends: tuple[RemoteLink, RemoteLink]) -> None:
    with pytest.raises(ValueError, match="another host"):
        ends[0].send("x", (0,))
    assert crossed(*ends, "still in step") == "still in step"


def test_what_cannot_be_sent_leaves_nothing_behind(ends: tuple[RemoteLink, RemoteLink]) -> None:
    with pytest.raises(Exception, match="layout"):
        ends[0].send([torch.randn(9000), torch.eye(3).to_sparse_csr()])
    assert torch.equal(crossed(*ends, torch.ones(9000)), torch.ones(9000))


# ── the channel ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_long_frames_arrive_whole() -> None:
    pairs = connected("long")
    one, other = (GlooChannel(pair, KEY) for pair in pairs)
    for size in (0, 1, 4056, 4057, 300_000):
        one.send(bytes(size))
        assert other.receive(20) == (bytes(size), [])
    for channel in (one, other):
        channel.close()


def frame(pair: GlooPair, key: bytes, *bodies: bytes) -> list[bytes]:
    """What a channel with this key sends."""
    sent: list[bytes] = []

    class Recorder:
        side = pair.side

        def send(self, contents: list[torch.Tensor], tags: int) -> None:
            sent.extend(one.numpy().tobytes() for one in contents)

        def receive(self, contents: torch.Tensor, tags: int) -> None:
            raise RuntimeError

    channel = GlooChannel(Recorder(), key)  # type: ignore[arg-type]
    for body in bodies:
        channel.send(body)
    return sent


@pytest.mark.parametrize("forged", ["another key", "our own, sent back", "another number", "changed", "twice"])
def test_frames_that_the_other_end_has_not_sent_are_not_read(forged: str) -> None:
    here, there = connected(forged)
    good = frame(there, KEY, b"first")[0]
    sent = {
        "another key": frame(there, b"a guess", b"first"),
        "our own, sent back": frame(here, KEY, b"first"),
        "another number": frame(there, KEY, b"zeroth", b"first")[1:],
        "changed": [good.replace(b"first", b"f!rst")],
        "twice": [good, good],
    }[forged]
    channel = GlooChannel(here, KEY)
    for one in sent:
        there.send([torch.frombuffer(bytearray(one), dtype=torch.uint8)], FRAMES)
    if forged == "twice":
        assert channel.receive(20) == (b"first", [])
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.receive(20)
    channel.close()
    there.close()


def test_the_end_of_a_process_ends_the_wait_of_the_other() -> None:
    here, there = connected("end")
    channel = GlooChannel(here, KEY)
    there.close()
    with pytest.raises(ChannelClosed):
        channel.receive(20)
    channel.close()


def test_workers_send_to_each_other_without_waiting() -> None:
    """Both send more than any buffer takes, and read only then."""
    pairs = connected("peers")
    device = Cpu()
    links = []
    for pair in pairs:
        channel = GlooChannel(pair, KEY)
        links.append(ThreadedRemoteLink(channel, P2PChannel(channel, pair), pair.side, device))
    value = torch.arange(3_000_000.0)
    for link in links:
        for _ in range(4):
            link.send([value])
    for link in links:
        for _ in range(4):
            found = link.receive(20)
            assert found is not None
            assert torch.equal(found[0][0], value)
    for link in links:
        link.close()


def test_versions_that_differ_are_named() -> None:
    assert version_differences({"torch": "2.6", "x": "1"}, {"torch": "2.6", "x": "1"}, "there") == ""
    assert version_differences({"torch": "2.6"}, {"torch": "2.7"}, "there") == "torch 2.6 (this host) and 2.7 (there)"
    assert "x — (this host) and 1 (there)" in version_differences({}, {"x": "1"}, "there")


@pytest.mark.parametrize("is_there", [True, False])
def test_nccl_is_for_two_different_gpus(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: is_there)
    assert choose_backend("GPU-1", "GPU-2") == ("nccl" if is_there else "gloo")
    assert [
        choose_backend("GPU-1", "GPU-1"),
        choose_backend("", "GPU-2"),
        choose_backend("GPU-1", ""),
        choose_backend("", ""),
    ] == ["gloo"] * 4


# ── the ledger ─────────────────────────────────────────────────────────────────────────────────────────────────────
Write = tuple[int, int, int]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 255)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_two_sides_have_the_same_bytes_after_each_exchange(writes: list[Write]) -> None:
    base = torch.zeros(10)
    mine = [
        nn.Parameter(torch.randn(3, 5).t()), base[2:5], base[4:], torch.tensor(7), torch.zeros(0),
        torch.zeros(3).bool(), torch.full((2,), float("nan"), dtype=torch.float64),
    ]  # fmt: skip
    here = ReplicaSync(mine)
    theirs = build_replica(here.layouts, [piece.clone() for piece in here.known])
    there = ReplicaSync(theirs)
    sides = [(here, mine, there), (there, theirs, here)]
    for side, at, byte in writes:
        ledger, tensors, other = sides[side]
        memory = tensors[at].data.untyped_storage()
        if memory.nbytes():
            memory[byte % memory.nbytes()] = byte % 2 if at == 5 else byte
        other.apply_changes(*ledger.pop_changes())
        assert ledger.pop_changes() == ([], [])
        assert other.pop_changes() == ([], [])
        for a, b in zip(mine, theirs, strict=True):
            assert bytes(a.untyped_storage()) == bytes(b.untyped_storage())
            assert (a.shape, a.stride(), a.dtype, type(a)) == (b.shape, b.stride(), b.dtype, type(b))
    assert theirs[1].untyped_storage().data_ptr() == theirs[2].untyped_storage().data_ptr()


def test_tensors_of_another_form_do_not_fit() -> None:
    base = torch.zeros(6)
    ledger = ReplicaSync([base[:3], base[3:]])
    assert ledger.fits([torch.ones(6)[:3].requires_grad_(), base[3:]]) is False  # they share no storage
    other = torch.ones(6)
    assert ledger.fits([other[:3], other[3:]])
    assert not ledger.fits([other.double()[:3], other.double()[3:]])
    assert not ledger.fits([other[:3]])
