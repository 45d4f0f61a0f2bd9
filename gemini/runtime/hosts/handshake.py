"""Handshake: two hosts authenticate each other by a shared secret, then compare their versions.

    controller                                       worker
    magic, random a                         ──►
                                            ◄──      magic, random b
    hash(secret, "controller", a, b)        ──►      else the worker closes the connection
                                            ◄──      hash(secret, "worker", a, b)
    offer: versions, device, …              ──►      from here on frames with the key hash(secret, "key", a, b)
                                            ◄──      answer: versions, or an error

Everything is of fixed size, or JSON in authenticated frames: nothing is unpickled. The run itself has its own key,
since the worker continues in another process.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import sys
import time
from typing import Any

from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.tcp_channel import TcpChannel

MAGIC = b"gemini worker 01"
_SIZE = 32  # bytes of random numbers, and of hashes
ROLES = (b"controller", b"worker")


class AuthenticationError(Exception):
    """The other end does not know the secret, or is no Gemini process."""


def versions() -> dict[str, str]:
    """Return the versions that must be equal on both hosts."""
    import torch

    from gemini import __version__

    python = ".".join(map(str, sys.version_info[:2]))
    return {"gemini": __version__, "torch": torch.__version__, "python": python, "byte order": sys.byteorder}


def version_differences(mine: dict[str, str], theirs: dict[str, str], local: str, remote: str) -> str:
    """Describe the versions that differ; '' if none do."""
    found = [
        f"{name} {mine.get(name, '—')} ({local}) and {theirs.get(name, '—')} ({remote})"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return "; ".join(found)


class AuthenticatedSession:
    """A connection between two authenticated ends: a channel for plain data, and the key of the run."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: bytes, side: int) -> None:
        self.connection = connection
        self.key = _hash(secret, b"run", nonces)
        self._channel = TcpChannel(connection, _hash(secret, b"key", nonces), side)

    def send(self, value: dict[str, Any]) -> None:
        """Send plain data."""
        self._channel.send(json.dumps(value).encode())

    def receive(self, seconds: float) -> dict[str, Any]:
        """Receive plain data; raise ChannelClosed if none arrives in time."""
        found = self._channel.receive(seconds)
        if found is None:
            raise ChannelClosed(f"no reply for {seconds:.0f} s")
        value = json.loads(found[0])
        if not isinstance(value, dict):
            raise AuthenticationError("it does not follow the protocol of gemini worker")
        return value


def authenticate(connection: socket.socket, secret: bytes, side: int, seconds: float) -> AuthenticatedSession:
    """Authenticate both ends; raise AuthenticationError if the other end fails, and OSError."""
    deadline = time.monotonic() + seconds
    mine = secrets.token_bytes(_SIZE)
    connection.settimeout(seconds)
    connection.sendall(MAGIC + mine)
    greeting = _exactly(connection, len(MAGIC) + _SIZE, deadline, "it has closed the connection")
    if not greeting.startswith(MAGIC[:-2]):
        raise AuthenticationError("the process at that address is no gemini worker")
    if not greeting.startswith(MAGIC):
        raise AuthenticationError(
            f"it uses version {greeting[len(MAGIC) - 2 : len(MAGIC)]!r} of the protocol, not {MAGIC[-2:]!r}"
        )
    theirs = greeting[len(MAGIC) :]
    nonces = mine + theirs if side == 0 else theirs + mine
    proof = _hash(secret, ROLES[side], nonces)
    if side == 0:
        connection.sendall(proof)
    found = _exactly(connection, _SIZE, deadline, "it has closed the connection: its secret is another one")
    if not hmac.compare_digest(found, _hash(secret, ROLES[1 - side], nonces)):
        raise AuthenticationError("it does not know the secret")
    if side == 1:
        connection.sendall(proof)
    connection.settimeout(None)
    return AuthenticatedSession(connection, secret, nonces, side)


def _exactly(connection: socket.socket, count: int, deadline: float, otherwise: str) -> bytes:
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(count - len(found))
        if not piece:
            raise AuthenticationError(otherwise)
        found += piece
    return found


def _hash(secret: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, what + b"\0" + nonces, hashlib.sha256).digest()
