"""Point-to-point channel: the contents of tensors between two hosts, through torch.distributed.

A frame carries the headers of its tensors; their bytes follow over this channel, in the order of the headers. The
receiver posts its receives in the sender's order, and nothing is negotiated. Each direction has its own tag (gloo) or
its own group (NCCL, which would otherwise queue both directions).

    sender      frame: headers ──────────────► receiver      over the channel
                bytes of header 1, 2, 3 ─────►               over the P2P channel

The ends exchange addresses through the channel that they already trust: the torch.distributed store sends every
value set in it over that channel.
"""

from __future__ import annotations

import marshal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.runtime.transport.channel import Channel, ChannelClosed

_PIECE = 64 << 20  # bytes that the timeout covers: larger tensors are sent in pieces


def choose_backend(mine: str, theirs: str) -> str:
    """Return NCCL between two different GPUs, given by UUID, else gloo; '' is a device that is no NVIDIA GPU."""
    return "nccl" if mine and theirs and mine != theirs and dist.is_nccl_available() else "gloo"


class P2PChannel:
    """One end; side 0 is the controller. One thread at a time may send, one may receive."""

    def __init__(self, channel: Channel, side: int, host: str, timeout: float, gpus: tuple[str, str]) -> None:
        self.channel, self.side = channel, side
        self.timeout = timedelta(seconds=timeout)
        self.back_end = choose_backend(*gpus)
        self._store = _ChannelStore(channel, timeout)
        try:
            self._gloo = self._connect_gloo(host)
            self._nccl = self._connect_nccl() if self.back_end == "nccl" else []
        except RuntimeError as error:
            raise ChannelClosed(f"tensors cannot be exchanged: {error}") from error

    def _connect_gloo(self, host: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self.timeout
        return dist.ProcessGroupGloo(self._store, self.side, 2, options)

    def _connect_nccl(self) -> list[Any]:
        """Return one group per direction: a transfer queued in one must not wait for the other."""
        stores = [dist.PrefixStore(f"nccl {direction}", self._store) for direction in range(2)]
        groups = [dist.ProcessGroupNCCL(store, self.side, 2) for store in stores]
        for direction, group in enumerate(groups):  # groups connect on first use: now, while the store listens
            first = torch.zeros(1, dtype=torch.uint8, device="cuda")
            (group.send if direction == self.side else group.recv)([first], 1 - self.side, direction).wait(self.timeout)
        torch.cuda.synchronize()
        return groups

    def memory(self, device: torch.device) -> torch.device:
        """Return where bytes of tensors of a device must lie to be sent or received."""
        return device if self._nccl and device.type == "cuda" else torch.device("cpu")

    def send(self, contents: torch.Tensor) -> None:
        """Send bytes that lie in `memory`."""
        self._do("send", contents, self.side)

    def receive(self, contents: torch.Tensor) -> None:
        """Fill a tensor with the next bytes."""
        self._do("recv", contents, 1 - self.side)

    def _do(self, what: str, contents: torch.Tensor, direction: int) -> None:
        group = self._nccl[direction] if contents.is_cuda else self._gloo
        try:
            for piece in contents.split(_PIECE):
                getattr(group, what)([piece], 1 - self.side, direction).wait(self.timeout)
            if contents.is_cuda:
                torch.cuda.synchronize(contents.device)  # wait() of NCCL only queues the wait
        except RuntimeError as error:
            self.channel.is_broken = True
            raise ChannelClosed(f"tensors cannot be transferred: {error}") from error
        except BaseException:
            self.channel.is_broken = True  # the position in the byte stream is lost
            raise


class _ChannelStore(dist.Store):  # type: ignore[misc]
    """A store for two processes: each value that one end sets is sent to the other."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        super().__init__()
        self._channel, self._deadline = channel, time.monotonic() + seconds
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value and send it."""
        plain = value if isinstance(value, bytes) else str(value).encode()
        self._values[key] = plain
        self._channel.send(marshal.dumps((key, plain)))

    def get(self, key: str) -> bytes:
        """Return a value that either end has set; wait for it."""
        while key not in self._values:
            found = self._channel.receive(max(0.0, self._deadline - time.monotonic()))
            if found is None:
                raise RuntimeError("the other end does not respond")
            name, value = marshal.loads(found[0])
            self._values[name] = value
        return self._values[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:  # noqa: ARG002
        """Wait until the keys are set."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys are set."""
        return all(key in self._values for key in keys)
