"""The channel: frames of bytes, and file descriptors, between two processes over a socket they both inherited.

    frame     8 bytes: length of the body     4 bytes: number of descriptors     body

A frame may be interrupted (a signal, Ctrl-C) at any byte; what has arrived is kept, and the next call goes on with it.
"""

from __future__ import annotations

import array
import socket
import struct
import threading

_HEADER = struct.Struct("<QI")
_PIECE = 1 << 18
_RIGHTS = socket.CMSG_SPACE(64 * array.array("i").itemsize)  # descriptors in one piece, at most


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a connection. Any thread may send; one at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._arrived = bytearray()
        self._descriptors: list[int] = []

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """The two ends of a new connection; neither has a name that others could connect to."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.connection.fileno()

    def close(self) -> None:
        """Give up the connection."""
        self.connection.close()

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raises ChannelClosed where nobody will read it."""
        with self._sending:
            frame = memoryview(_HEADER.pack(len(body), len(descriptors)) + body)
            try:
                if descriptors:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                    frame = frame[self.connection.sendmsg([frame[: _HEADER.size]], rights) :]
                # Signals must not leave half a frame behind: the rest is sent even if a handler raises.
                self._send_rest(frame)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def _send_rest(self, frame: memoryview) -> None:
        pending: BaseException | None = None
        while frame:
            try:
                frame = frame[self.connection.send(frame) :]
            except KeyboardInterrupt as interrupt:
                pending = interrupt
        if pending is not None:
            raise pending

    # ── receiving ──────────────────────────────────────────────────────────────────────────────────────────────
    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next frame and its descriptors; None if nothing arrives for as long as `be_patient` says."""
        while True:
            found = self._complete()
            if found is not None:
                return found
            if not self._read():
                return None

    def be_patient(self, seconds: float) -> None:
        """Let `receive` return after so long without a byte. The kernel keeps the time: it costs no call."""
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _complete(self) -> tuple[bytes, list[int]] | None:
        if len(self._arrived) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._arrived)
        end = _HEADER.size + length
        if len(self._arrived) < end:
            return None
        body = bytes(memoryview(self._arrived)[_HEADER.size : end])
        del self._arrived[:end]
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return body, descriptors

    def _read(self) -> bool:
        try:
            piece, rights, _, _ = self.connection.recvmsg(_PIECE, _RIGHTS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self._descriptors += found
        if not piece:
            raise ChannelClosed("the other side has closed the connection")
        self._arrived += piece
        return True
