"""Lanes: the contents of tensors between two hosts, through torch.distributed.

A frame says which tensors come (their headers), the lane carries their bytes after it, in the order of the headers. So
the receiver posts its receives in the sender's order, and nothing is negotiated. Each direction has a tag of its own
(gloo) or a group of its own (NCCL, which would otherwise wait for both directions in one queue).

    sender      frame: headers ──────────────► receiver      over the channel
                bytes of header 1, 2, 3 ─────►               over the lane: pool ──► window

Two ends meet through the channel they already trust: the store in which torch.distributed leaves addresses sends what
is set in it over that channel.
"""

from __future__ import annotations

import marshal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.runtime.transport.channel import Channel, ChannelClosed

_PIECE = 64 << 20  # bytes: the timeout is for so many, however large a tensor is


def choose_backend(mine: str, theirs: str) -> str:
    """Who carries tensors of the devices: NCCL between two different GPUs, named by their identities; else gloo.

    An empty identity is a device that is no GPU of NVIDIA's.
    """
    return "nccl" if mine and theirs and mine != theirs and dist.is_nccl_available() else "gloo"


class P2PChannel:
    """One end; side 0 is the controller's. Any thread may send, one at a time; one at a time may receive."""

    def __init__(self, channel: Channel, side: int, host: str, timeout: float, gpus: tuple[str, str]) -> None:
        self.channel, self.side = channel, side
        self.timeout = timedelta(seconds=timeout)
        self.back_end = choose_backend(*gpus)
        self._store = _ChannelStore(channel, timeout)
        try:
            self._gloo = self._met(host)
            self._nccl = self._met_by_nccl() if self.back_end == "nccl" else []
        except RuntimeError as error:
            raise ChannelClosed(f"tensors cannot be exchanged: {error}") from error

    def _met(self, host: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self.timeout
        return dist.ProcessGroupGloo(self._store, self.side, 2, options)

    def _met_by_nccl(self) -> list[Any]:
        """A group for each direction: what is queued in one must not wait for the other."""
        stores = [dist.PrefixStore(f"nccl {way}", self._store) for way in range(2)]
        groups = [dist.ProcessGroupNCCL(store, self.side, 2) for store in stores]
        for way, group in enumerate(groups):  # they meet when they are first used: now, while the store listens
            first = torch.zeros(1, dtype=torch.uint8, device="cuda")
            (group.send if way == self.side else group.recv)([first], 1 - self.side, way).wait(self.timeout)
        torch.cuda.synchronize()
        return groups

    def memory(self, device: torch.device) -> torch.device:
        """Where bytes of a device's tensors are, for the lane to send or receive them."""
        return device if self._nccl and device.type == "cuda" else torch.device("cpu")

    def send(self, contents: torch.Tensor) -> None:
        """Bytes, in any lane's memory; they are on their way when this returns."""
        self._do("send", contents, self.side)

    def receive(self, contents: torch.Tensor) -> None:
        """Fill a tensor with the bytes that come next."""
        self._do("recv", contents, 1 - self.side)

    def _do(self, what: str, contents: torch.Tensor, way: int) -> None:
        group = self._nccl[way] if contents.is_cuda else self._gloo
        try:
            for piece in contents.split(_PIECE):
                getattr(group, what)([piece], 1 - self.side, way).wait(self.timeout)
            if contents.is_cuda:
                torch.cuda.synchronize(contents.device)  # waiting for NCCL only queues the wait
        except RuntimeError as error:
            self.channel.is_broken = True
            raise ChannelClosed(f"tensors do not come across: {error}") from error
        except BaseException:
            self.channel.is_broken = True  # nobody knows any more which bytes are next
            raise


class _ChannelStore(dist.Store):  # type: ignore[misc]
    """A store of two: what one end sets is sent to the other."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        super().__init__()
        self._channel, self._deadline = channel, time.monotonic() + seconds
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Tell the other end."""
        plain = value if isinstance(value, bytes) else str(value).encode()
        self._values[key] = plain
        self._channel.send(marshal.dumps((key, plain)))

    def get(self, key: str) -> bytes:
        """Ours, or what the other end will have set."""
        while key not in self._values:
            found = self._channel.receive(max(0.0, self._deadline - time.monotonic()))
            if found is None:
                raise RuntimeError("the other end does not answer")
            name, value = marshal.loads(found[0])
            self._values[name] = value
        return self._values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # noqa: ARG002
        """Until they are set."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether they are."""
        return all(key in self._values for key in keys)
