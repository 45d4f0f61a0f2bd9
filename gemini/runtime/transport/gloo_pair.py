"""Gloo pair: two processes on different hosts, connected by a process group of torch.distributed.

    tag      0, 1     contents of tensors, by direction
             2, 3     frames, by direction

The two meet at a store of torch.distributed, under a prefix of their own, where they exchange the addresses on which
they listen. gloo listens only on the address that each end names.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TENSORS, FRAMES = 0, 2  # first tags
_FOREVER = timedelta(days=30)
_PIECE = 64 << 20  # bytes that the timeout covers: larger tensors are sent in pieces


class MeetingPoint(NamedTuple):
    """Where two processes meet: the address of a store, and the prefix of their keys in it."""

    host: str
    port: int
    prefix: str

    def join(self, seconds: float) -> Any:
        """Return the store; raises RuntimeError where it cannot be reached."""
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=seconds))
        return dist.PrefixStore(self.prefix, store)


class GlooPair:
    """One end; side 0 is the controller, or the worker with the lower number. Blocks until the other end is there."""

    def __init__(self, store: Any, side: int, host: str, seconds: float) -> None:
        self.store, self.side, self.timeout = store, side, timedelta(seconds=seconds)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self.timeout
        self._group = dist.ProcessGroupGloo(store, side, 2, options)

    def send(self, contents: torch.Tensor, tags: int) -> None:
        """Send bytes; raise RuntimeError if the other end is gone, or takes none of them in time."""
        for piece in contents.split(_PIECE):
            self._group.send([piece], 1 - self.side, tags + self.side).wait(self.timeout)

    def receive(self, contents: torch.Tensor, tags: int) -> None:
        """Fill a tensor with the next bytes; raise RuntimeError if the other end is gone. Frames may take forever."""
        limit = self.timeout if tags == TENSORS else _FOREVER
        for piece in contents.split(_PIECE):
            self._group.recv([piece], 1 - self.side, tags + 1 - self.side).wait(limit)
