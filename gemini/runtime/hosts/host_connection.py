"""Host connection: the controller connects to `gemini worker` on another host and requests a process.

    connect(address, …)     a session, and the host's answer: process, threads, path, GPU
    RemoteProcess           that process: whether it runs, how it ended, its stacks

The host is queried about a process over a separate connection, since the process itself may hang.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
from typing import Any

from gemini.config.host_address import Address
from gemini.errors import WorkerError
from gemini.runtime.hosts.handshake import (
    AuthenticatedSession,
    AuthenticationError,
    authenticate,
    version_differences,
    versions,
)
from gemini.runtime.transport.channel import ChannelClosed

PATIENCE = 5.0  # seconds for each step of the handshake


def connect(address: Address, secret: bytes, request: dict[str, Any]) -> tuple[AuthenticatedSession, dict[str, Any]]:
    """Connect to a listener and request a process; raise WorkerError with a remedy."""
    who = f"the worker at {address.place}"
    command = f"gemini worker --listen {address.place} --secret-file FILE"
    try:
        connection = socket.create_connection((address.host, address.port), PATIENCE)
    except OSError as error:
        raise WorkerError(
            f"{who} cannot be reached: {error}\n    → start it on that host: {command}; and check that the port is open"
        ) from None
    try:
        session = authenticate(connection, secret, 0, PATIENCE)
        session.send({"versions": versions(), **request})
        answer = session.receive(PATIENCE)
        connection.settimeout(None)
    except AuthenticationError as error:
        connection.close()
        raise WorkerError(f"{who} failed authentication: {error}\n    → give both ends the same secret file") from None
    except (OSError, ChannelClosed, ValueError) as error:
        connection.close()
        raise WorkerError(f"{who} does not reply: {error}\n    → see its messages; start it again: {command}") from None
    different = version_differences(versions(), answer.get("versions", {}), "this host", "its host")
    if different or "error" in answer:
        connection.close()
        raise WorkerError(
            f"{who} has other versions: {different}\n    → install the same versions on both hosts"
            if different
            else f"{who}: {answer['error']}"
        )
    return session, answer


class RemoteProcess:
    """The process of a worker on another host."""

    def __init__(self, address: Address, secret: bytes, session: AuthenticatedSession, answer: dict[str, Any]) -> None:
        self.address, self.pid = address, int(answer["pid"])
        self.stacks = ""
        self._secret, self._connection = secret, session.connection
        self._poll = select.poll()
        self._poll.register(session.connection, select.POLLRDHUP)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return a code if the connection has been closed, else None."""
        if self._code is None:
            try:
                return 1 if self._poll.poll(0) else None
            except OSError:
                return 1
        return self._code

    def wait(self, timeout: float) -> int:
        """Return how it ended, as its host reports."""
        if self._code is None:
            self._query("ending")
        if self._code is None:
            raise subprocess.TimeoutExpired(str(self.address), timeout)
        return self._code

    def send_signal(self, number: int) -> None:  # noqa: ARG002
        """Make its host read the stacks."""
        self._query("stacks")

    def kill(self) -> None:
        """Close the connection: its host then ends it."""
        self._code = 0 if self._code is None else self._code
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _query(self, about: str) -> None:
        with contextlib.suppress(WorkerError):
            session, answer = connect(self.address, self._secret, {"about": about, "pid": self.pid})
            session.connection.close()
            self.stacks = answer.get("stacks", "")
            self._code = answer.get("code")
