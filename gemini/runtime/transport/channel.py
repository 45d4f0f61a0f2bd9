"""The channel: frames of bytes, and file descriptors, between two processes over a socket they both inherited.

    frame     8 bytes: length of the body     4 bytes: number of descriptors     body

Ctrl-C may strike anywhere. While a frame is awaited nothing is lost; in the short time in which bytes are handed over,
an exception leaves the channel *torn*: nobody can tell any more where a frame begins, and it is not used again.

To be woken costs more than a small call takes, for the processor has gone to sleep. So where the last frame came soon,
the next is looked for a while, giving way to whoever else wants the processor, before the process sleeps.
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
_LOOKING = 3e-4  # seconds
_AT_ONCE = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_RIGHTS = socket.CMSG_SPACE(64 * array.array("i").itemsize)  # descriptors in one piece, at most


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a connection. Any thread may send; one at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._piece = memoryview(bytearray(_PIECE))  # used again and again: new memory costs more than a frame
        self._arrived = bytearray()  # pieces of a frame that is not all there
        self._descriptors: list[int] = []
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._held: list[tuple[bytes, bytes]] | None = None  # frames that are to be sent later; None: nothing waits
        self._is_brisk = True  # the last frame came soon
        self.is_broken = False

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """The two ends of a new connection; neither has a name that others could connect to."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    @property
    def has_more(self) -> bool:
        """Whether something has been read already that nobody has taken: waiting on the descriptor would miss it."""
        return bool(self._arrived)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.connection.fileno()

    def close(self) -> None:
        """Give up the connection."""
        self.connection.close()

    def set_send_timeout(self, seconds: float) -> None:
        """How long sending may wait for the other side to make room, before it counts as gone."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raises ChannelClosed where nobody will read it."""
        header = _HEADER.pack(len(body), len(descriptors))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else ()
        with self._sending:
            if self.is_broken:
                self._check()
            if self._held is not None and not rights:
                self._held.append((header, body))
                return
            self._flush()  # descriptors do not wait: they are closed once they are sent
            self._put(header, body, rights)

    def hold(self) -> None:
        """Send frames when `let_go` is called, and no sooner: whoever reads one begins to work, and may take the
        processor from who sends."""
        with self._sending:
            self._held = []

    def let_go(self) -> None:
        """Send what was held; raises ChannelClosed where nobody will read it."""
        with self._sending:
            try:
                self._flush()
            finally:
                self._held = None

    def _flush(self) -> None:
        while self._held:
            self._put(*self._held.pop(0), ())

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
        """The next frame and its descriptors; None if nothing arrives for `timeout` seconds."""
        patience = None if timeout is None else timeout * 1000
        flags = socket.MSG_CMSG_CLOEXEC if patience != 0 else _AT_ONCE  # whoever waits does so elsewhere
        while True:
            if self._arrived:
                found = self._complete()
                if found is not None:
                    return found
            if self.is_broken:
                self._check()
            try:
                if patience != 0 and not self._await(patience):
                    return None
                found = self._read(flags)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if found is not None:
                return found

    def _await(self, patience: float | None) -> bool:
        """Whether something has arrived in so many milliseconds."""
        poll, began = self._poll.poll, time.perf_counter()
        while self._is_brisk:
            if poll(0):
                return True
            os.sched_yield()
            self._is_brisk = time.perf_counter() - began < _LOOKING
        found = bool(poll(patience))
        self._is_brisk = time.perf_counter() - began < 2 * _LOOKING
        return found

    def _complete(self) -> tuple[bytes, list[int]] | None:
        """The first frame of what has arrived in pieces, if it is all there."""
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
        """Take what has arrived: the next frame, if that is exactly it, else it waits for the rest."""
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
