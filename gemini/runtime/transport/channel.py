"""Channel: frames of bytes and file descriptors between two processes over a socket they inherited.

    frame     8 bytes: length of the body     4 bytes: number of descriptors     body

A Ctrl-C may arrive at any point. Waiting for a frame is safe; an exception in the short time in which bytes are
transferred leaves the channel *broken*: frame boundaries are lost, and the channel is not used again.

Waking a sleeping process costs more than a small call takes. Where the last frame came soon, the receiver therefore
polls for a while, yielding the processor, before it blocks.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from typing import Any

_HEADER = struct.Struct("<QI")
_PIECE = 1 << 18
_POLLING = 3e-4  # seconds
_AT_ONCE = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_RIGHTS = socket.CMSG_SPACE(64 * array.array("i").itemsize)  # descriptors in one piece, at most


class ChannelClosed(Exception):
    """The other side has closed the connection, or the channel is broken."""


class Channel:
    """One end of a connection. Any thread may send; one thread at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._piece = memoryview(bytearray(_PIECE))  # reused: allocating costs more than a frame
        self._arrived = bytearray()  # bytes of incomplete frames
        self._descriptors: list[int] = []
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._corked: list[tuple[bytes, bytes]] | None = None  # frames held back; None: not corked
        self._is_polling = True  # the last frame came soon: poll before blocking
        self.is_broken = False

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a new connection; neither has a name that other processes could connect to."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @property
    def has_more(self) -> bool:
        """Whether received bytes wait in this process: polling the descriptor would miss them."""
        return bool(self._arrived)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def set_send_timeout(self, seconds: float) -> None:
        """Limit how long sending may wait for room before the other side counts as gone."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raise ChannelClosed if the other side is gone."""
        header = _HEADER.pack(len(body), len(descriptors))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else ()
        with self._sending:
            if self.is_broken:
                self._check()
            if self._corked is not None and not rights:
                self._corked.append((header, body))
                return
            self._flush()  # descriptors are not held back: their sender closes them once they are sent
            self._put(header, body, rights)

    def cork(self) -> None:
        """Hold frames back until `uncork`: a receiver that starts to work may take the processor from the sender."""
        with self._sending:
            self._corked = []

    def uncork(self) -> None:
        """Send the frames held back; raise ChannelClosed if the other side is gone."""
        with self._sending:
            try:
                self._flush()
            finally:
                self._corked = None

    def _flush(self) -> None:
        while self._corked:
            self._put(*self._corked.pop(0), ())

    def _put(self, header: bytes, body: bytes, rights: Any) -> None:
        try:
            sent = self.connection.sendmsg((header, body), rights)
            if sent < len(header) + len(body):
                self._send_rest(memoryview(header + body)[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        except BaseException:
            self.is_broken = True
            raise

    def _send_rest(self, frame: memoryview) -> None:
        while frame:
            frame = frame[self.connection.send(frame) :]

    def _check(self) -> None:
        if self.is_broken:
            raise ChannelClosed("it was interrupted in the middle of a message")

    # ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────
    def receive(self, timeout: float | None = None) -> tuple[bytes, list[int]] | None:
        """Return the next frame and its descriptors; None if nothing arrives for `timeout` seconds."""
        limit_ms = None if timeout is None else timeout * 1000
        flags = socket.MSG_CMSG_CLOEXEC if limit_ms != 0 else _AT_ONCE  # without a timeout the caller polls
        while True:
            if self._arrived:
                found = self._complete()
                if found is not None:
                    return found
            if self.is_broken:
                self._check()
            try:
                if limit_ms != 0 and not self._await(limit_ms):
                    return None
                found = self._read(flags)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if found is not None:
                return found

    def _await(self, limit_ms: float | None) -> bool:
        """Return whether something arrives within so many milliseconds; None waits without limit."""
        poll, began = self._poll.poll, time.perf_counter()
        while self._is_polling:
            if poll(0):
                return True
            os.sched_yield()
            self._is_polling = time.perf_counter() - began < _POLLING
        found = bool(poll(limit_ms))
        self._is_polling = time.perf_counter() - began < 2 * _POLLING
        return found

    def _complete(self) -> tuple[bytes, list[int]] | None:
        """Return the first frame of the bytes received so far, if it is complete."""
        if len(self._arrived) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._arrived)
        end = _HEADER.size + length
        if len(self._arrived) < end:
            return None
        try:
            body = bytes(memoryview(self._arrived)[_HEADER.size : end])
            del self._arrived[:end]
            return body, self._take_descriptors(count)
        except BaseException:
            self.is_broken = True
            raise

    def _read(self, flags: int) -> tuple[bytes, list[int]] | None:
        """Read the socket; return the frame if the bytes are exactly one, else buffer them."""
        try:
            size, rights, _, _ = self.connection.recvmsg_into((self._piece,), _RIGHTS, flags)
            for level, kind, data in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found = array.array("i")
                    found.frombytes(data[: len(data) - len(data) % found.itemsize])
                    self._descriptors += found
            if not self._arrived and size >= _HEADER.size:
                length, count = _HEADER.unpack_from(self._piece)
                if size == _HEADER.size + length:
                    return bytes(self._piece[_HEADER.size : size]), self._take_descriptors(count)
            self._arrived += self._piece[:size]
        except OSError:
            raise
        except BaseException:
            self.is_broken = True
            raise
        if not size:
            raise ChannelClosed("the other side has closed the connection")
        return None

    def _take_descriptors(self, count: int) -> list[int]:
        if not count:
            return []
        found, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return found
