"""A channel between hosts: frames over torch.distributed's gloo, with the interface of the channel on one host.

    frame     8 bytes: length of the body     body          each direction has a tag of its own

Two ends meet at a store; the first to come listens there, on the loopback address unless told otherwise. Before any
frame is read both ends prove that they know the secret of the run: each answers the other's random challenge with a
keyed hash of it. Descriptors do not cross hosts, and tensors travel inside the frames.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import queue
import secrets
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.runtime.transport.channel import Channel, ChannelClosed

_PATIENCE = timedelta(days=7)  # gloo's own: whoever waits has a watchdog
_BYE = -1
_NONCE = 32  # bytes


class GlooChannel(Channel):
    """One end: side 0 listens, side 1 comes. Any thread may send; one at a time may receive."""

    is_far = True

    def __init__(self, group: Any, store: Any, side: int) -> None:
        self._group, self._side = group, side
        self._store = store  # open as long as the channel is
        self._sending = threading.Lock()
        self._frames: queue.SimpleQueue[bytes | ChannelClosed] = queue.SimpleQueue()
        self._closed = ""
        self.torn = False
        threading.Thread(target=self._read_all, name="gemini-gloo", daemon=True).start()

    # ── meeting ────────────────────────────────────────────────────────────────────────────────────────────────
    @staticmethod
    def listen(secret: bytes, door: socket.socket, host: str = "127.0.0.1", seconds: float = 60.0) -> GlooChannel:
        """Wait at a listening socket for the other end; `host` is our own address, as the other end reaches it."""
        store = dist.TCPStore(
            host, door.getsockname()[1], 2, True, timedelta(seconds=seconds), master_listen_fd=door.detach()
        )
        return _met(store, 0, secret, host, seconds)

    @staticmethod
    def join(secret: bytes, host: str, port: int, own_host: str = "127.0.0.1", seconds: float = 60.0) -> GlooChannel:
        """Come to the end that listens at `host`; `own_host` is our own address, as that end reaches it."""
        store = dist.TCPStore(host, port, 2, False, timedelta(seconds=seconds))
        return _met(store, 1, secret, own_host, seconds)

    @staticmethod
    def door(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
        """A listening socket; port 0: any."""
        return socket.create_server((host, port))

    def prove(self, secret: bytes, seconds: float) -> None:
        """Let each end show that it knows the secret; raises ChannelClosed if the other one does not."""
        mine = secrets.token_bytes(_NONCE)
        self.send(mine)
        theirs = self._next(seconds)
        self.send(_answer(secret, self._side, theirs))
        if not hmac.compare_digest(self._next(seconds), _answer(secret, 1 - self._side, mine)):
            self.close()
            raise ChannelClosed("the other end does not know the secret of this run")

    def _next(self, seconds: float) -> bytes:
        found = self.receive(seconds)
        if found is None:
            raise ChannelClosed(f"the other end has not answered for {seconds:.0f} s")
        return found[0]

    # ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raises ChannelClosed where nobody will read it."""
        if descriptors:
            raise ValueError("descriptors cannot be sent to another host")
        with self._sending:
            if self._closed:
                raise ChannelClosed(self._closed)
            self._put(torch.tensor([len(body)]))
            if body:
                self._put(torch.frombuffer(bytearray(body), dtype=torch.uint8))

    def receive(self, timeout: float | None = None) -> tuple[bytes, list[int]] | None:
        """The next frame; None if nothing arrives for `timeout` seconds."""
        try:
            found = self._frames.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(found, ChannelClosed):
            self._frames.put(found)  # for whoever asks next
            raise ChannelClosed(str(found))
        return found, []

    def close(self) -> None:
        """Give up the connection; the other end is told."""
        with self._sending:
            if not self._closed:
                self._closed = "this end has closed the connection"
                self._frames.put(ChannelClosed(self._closed))
                with contextlib.suppress(ChannelClosed):
                    self._put(torch.tensor([_BYE]))

    def limit_sending(self, seconds: float) -> None:
        """Nothing to set: gloo notices by itself that the other side is gone."""

    def _put(self, tensor: torch.Tensor) -> None:
        try:
            self._group.send([tensor], 1 - self._side, self._side).wait()
        except RuntimeError as error:
            self._closed = str(error)
            raise ChannelClosed(self._closed) from error

    def _read_all(self) -> None:
        """In a thread of its own: gloo cannot be asked whether something has arrived."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                self._get(length)
                if int(length) == _BYE:
                    break
                body = torch.empty(int(length), dtype=torch.uint8)
                if len(body):
                    self._get(body)
                self._frames.put(body.numpy().tobytes())
            self.close()
            self._frames.put(ChannelClosed("the other side has closed the connection"))
        except RuntimeError as error:
            self._frames.put(ChannelClosed(f"the other side is gone: {error}"))

    def _get(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], 1 - self._side, 1 - self._side).wait()


def _met(store: Any, side: int, secret: bytes, host: str, seconds: float) -> GlooChannel:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _PATIENCE
    group = dist.ProcessGroupGloo(store, side, 2, options)
    channel = GlooChannel(group, store, side)
    channel.prove(secret, seconds)
    return channel


def _answer(secret: bytes, side: int, nonce: bytes) -> bytes:
    return hmac.new(secret, bytes([side]) + nonce, hashlib.sha256).digest()
