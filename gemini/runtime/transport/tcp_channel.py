"""TCP channel: the frames of a channel between hosts, each authenticated by a keyed hash.

    frame     32 bytes: hash of direction, sequence number and body     body

Both ends derive the session key from the shared secret during the handshake. Everything that is read (and unpickled)
was therefore sent by the other end, in this order; a frame that fails the check closes the connection. Nothing is
encrypted. Descriptors do not cross hosts.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading

from gemini.runtime.transport.channel import Channel, ChannelClosed

_HASH = 32  # bytes
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class TcpChannel(Channel):
    """One end: side 0 is the controller, side 1 the worker."""

    def __init__(self, connection: socket.socket, key: bytes, side: int) -> None:
        super().__init__(connection)
        self._keys = [hmac.new(key, bytes([one]), hashlib.sha256).digest() for one in (side, 1 - side)]
        self._sent = self._received = 0
        self._order = threading.Lock()  # sequence numbers follow the order of sending
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():  # detects a host that has lost power
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raise ChannelClosed if the other side is gone."""
        if descriptors:
            raise ValueError("descriptors cannot be sent to another host")
        with self._order:
            number, self._sent = self._sent, self._sent + 1
            super().send(_hash(self._keys[0], number, body) + body)

    def cork(self) -> None:
        """Do nothing: tensor contents use another connection, whose receiver waits for the frame."""

    def receive(self, timeout: float | None = None) -> tuple[bytes, list[int]] | None:
        """Return the next frame; None if nothing arrives for `timeout` seconds."""
        found = super().receive(timeout)
        if found is None:
            return None
        number, self._received = self._received, self._received + 1
        body = found[0][_HASH:]
        if not hmac.compare_digest(found[0][:_HASH], _hash(self._keys[1], number, body)):
            self.is_broken = True
            raise ChannelClosed("a frame failed its authentication")
        return body, []


def _hash(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + body, "sha256")
