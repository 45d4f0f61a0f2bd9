"""Gloo pair: two processes on different hosts, connected by a process group of torch.distributed.

    tag      0, 1     contents of tensors, by direction
             2, 3     frames, by direction

The two meet at a store of torch.distributed, under a prefix of their own, where they exchange the addresses on which
they listen. gloo listens only on the address that each end names.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
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
    """One end; side 0 is the controller, or the worker with the lower number. Blocks until the other end is there.

    gloo offers no way to end a wait. `close` therefore shuts down the connection itself, whose socket is the one that
    appeared while gloo connected.
    """

    def __init__(self, store: Any, side: int, host: str, seconds: float) -> None:
        self.store, self.side, self.timeout = store, side, timedelta(seconds=seconds)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self.timeout
        before = _connections(host)
        self._group = dist.ProcessGroupGloo(store, side, 2, options)
        new = [descriptor for number, descriptor in _connections(host).items() if number not in before]
        self._sockets = [socket.socket(fileno=os.dup(descriptor)) for descriptor in new]

    def close(self) -> None:
        """End the connection: waiting calls raise, here and, if the link works, at the other end."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []

    def send(self, contents: Sequence[torch.Tensor], tags: int) -> None:
        """Send bytes; raise RuntimeError if the other end is gone, or takes none of them in time."""
        works = [
            self._group.send([piece], 1 - self.side, tags + self.side)
            for one in contents
            for piece in one.split(_PIECE)
        ]
        for work in works:
            work.wait(self.timeout)

    def receive(self, contents: Sequence[torch.Tensor], tags: int) -> None:
        """Fill tensors with the next bytes; raise RuntimeError if the other end is gone. Frames may take forever."""
        limit = self.timeout if tags == TENSORS else _FOREVER
        works = [
            self._group.recv([piece], 1 - self.side, tags + 1 - self.side)
            for one in contents
            for piece in one.split(_PIECE)
        ]
        for work in works:
            work.wait(limit)


def _connections(host: str) -> dict[int, int]:
    """Return the TCP connections of this process from an address: descriptors by inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[0] == host:
                    one.getpeername()  # raises where it only listens
                    found[status.st_ino] = descriptor
    return found
