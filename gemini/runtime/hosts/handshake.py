"""The handshake: two hosts prove that they know the secret, then agree on what they are.

    controller                                       worker
    magic, random a                         ──►
                                            ◄──      magic, random b
    hash(secret, "controller", a, b)        ──►      or it hangs up, and has shown nothing
                                            ◄──      hash(secret, "worker", a, b)
    offer: versions, device, …              ──►      from here on frames with the key hash(secret, "key", a, b)
                                            ◄──      answer: versions, or what is wrong

All of it is fixed sizes, and JSON in frames that are proven: nothing is unpickled. The run itself has a key of its own,
since the worker goes on in another process.
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
    """The other end is not one of ours."""


def versions() -> dict[str, str]:
    """What must be the same on both hosts."""
    import torch

    from gemini import __version__

    python = ".".join(map(str, sys.version_info[:2]))
    return {"gemini": __version__, "torch": torch.__version__, "python": python, "byte order": sys.byteorder}


def version_differences(mine: dict[str, str], theirs: dict[str, str], here: str, there: str) -> str:
    """Which versions differ, with those of both; '' if none do."""
    found = [
        f"{name} {mine.get(name, '—')} ({here}) and {theirs.get(name, '—')} ({there})"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return "; ".join(found)


class AuthenticatedSession:
    """What two ends that trust each other have: a channel for the agreement, and the key of the run."""

    def __init__(self, connection: socket.socket, secret: bytes, nonces: bytes, side: int) -> None:
        self.connection = connection
        self.key = _hash(secret, b"run", nonces)
        self._channel = TcpChannel(connection, _hash(secret, b"key", nonces), side)

    def say(self, value: dict[str, Any]) -> None:
        """Send plain data."""
        self._channel.send(json.dumps(value).encode())

    def hear(self, seconds: float) -> dict[str, Any]:
        """Receive plain data; raises ChannelClosed where none comes in time."""
        found = self._channel.receive(seconds)
        if found is None:
            raise ChannelClosed(f"no answer for {seconds:.0f} s")
        value = json.loads(found[0])
        if not isinstance(value, dict):
            raise AuthenticationError("it does not speak as a worker does")
        return value


def authenticate(connection: socket.socket, secret: bytes, side: int, seconds: float) -> AuthenticatedSession:
    """Let both ends prove themselves; raises Unproven where the other one cannot, and OSError."""
    deadline = time.monotonic() + seconds
    mine = secrets.token_bytes(_SIZE)
    connection.settimeout(seconds)
    connection.sendall(MAGIC + mine)
    hello = _exactly(connection, len(MAGIC) + _SIZE, deadline, "it has hung up")
    if not hello.startswith(MAGIC[:-2]):
        raise AuthenticationError("what listens there is no gemini worker")
    if not hello.startswith(MAGIC):
        raise AuthenticationError(
            f"it speaks version {hello[len(MAGIC) - 2 : len(MAGIC)]!r} of the protocol, not {MAGIC[-2:]!r}"
        )
    theirs = hello[len(MAGIC) :]
    nonces = mine + theirs if side == 0 else theirs + mine
    proof = _hash(secret, ROLES[side], nonces)
    if side == 0:
        connection.sendall(proof)
    found = _exactly(connection, _SIZE, deadline, "it has hung up: its secret is another one")
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
