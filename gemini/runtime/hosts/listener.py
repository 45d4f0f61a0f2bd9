"""Listener: the process behind `gemini worker`. It authenticates controllers and starts a process per worker.

    controller ──connect──► listener: authenticates, compares versions
                                │ starts
                            session (a process) ◄──── takes over the connection
                                │ ends, or the controller disconnects: the rest is cleaned up

The listener itself runs nothing on behalf of a controller: it reads fixed sizes and, once authenticated, JSON. It
exits with its last session unless it is configured to keep running; sessions end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gemini.config.host_address import Address
from gemini.errors import ConfigError, UsageError
from gemini.runtime.devices import registry
from gemini.runtime.devices.remote_device import gpu_identity
from gemini.runtime.hosts import spawn
from gemini.runtime.hosts.handshake import (
    AuthenticatedSession,
    AuthenticationError,
    authenticate,
    version_differences,
    versions,
)
from gemini.runtime.transport.channel import ChannelClosed

ENTRY = "gemini.runtime.hosts.host_session"
_TIMEOUT = 5.0  # seconds for the handshake
_AT_ONCE = 32  # connections in the handshake
_GRACE = 3.0  # seconds in which a session may exit by itself, and its controller may query how it ended
_STACKS = 20_000  # characters


class Listener:
    """Serves controllers at an address."""

    def __init__(self, address: Address, secret: bytes, threads: int, keep: bool, log: Callable[[str], None]) -> None:
        self._secret, self._threads, self._keep, self._log = secret, threads, keep, log
        self._unauthenticated = threading.BoundedSemaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[spawn.Process, int]] = {}  # by process: its stacks
        self._ended: dict[int, tuple[int, str]] = {}  # code and stacks
        self._wakeup, self._waker = os.pipe()  # written when a session has ended
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {address.place}: {error}\n    → name an address of this host and a free port"
            ) from None
        self.address = Address(address.host, self._socket.getsockname()[1])

    def serve(self) -> None:
        """Serve until the last session has ended, or forever."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        ready.register(self._wakeup, select.POLLIN)
        limit: float | None = None  # when to exit
        try:
            while limit is None or time.monotonic() < limit:
                left = None if limit is None else max(0.0, limit - time.monotonic()) * 1000
                for descriptor, _ in ready.poll(left):
                    if descriptor == self._wakeup:
                        os.read(self._wakeup, 1)
                        limit = self._exit_time()
                    else:
                        self._open()
                        limit = None if self._running else limit
        finally:
            self._socket.close()
            for process, _ in list(self._running.values()):
                process.kill()

    def _exit_time(self) -> float | None:
        """Return when to exit; None: not yet. A controller whose worker was lost may still query it."""
        with self._lock:
            if self._keep or self._running:
                return None
            was_lost = any(code for code, _ in self._ended.values())
        return time.monotonic() + (_GRACE if was_lost else 0.0)

    def _open(self) -> None:
        connection, (host, *_) = self._socket.accept()
        if self._unauthenticated.acquire(blocking=False):
            threading.Thread(target=self._authenticate, args=(connection, host), daemon=True).start()
        else:
            connection.close()

    # ── handshake ────────────────────────────────────────────────────────────────────────────────────────────────
    def _authenticate(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                session = authenticate(connection, self._secret, 1, _TIMEOUT)
                request = session.receive(_TIMEOUT)
            except (AuthenticationError, ChannelClosed, OSError, ValueError) as error:
                self._log(f"refused {host}: {error}")
                return
            finally:
                self._unauthenticated.release()
            try:
                self._serve(session, request, host)
            except (ChannelClosed, OSError) as error:
                self._log(f"the connection with {host} was lost: {error}")

    def _serve(self, session: AuthenticatedSession, request: dict[str, Any], host: str) -> None:
        mine, theirs = versions(), request.get("versions", {})
        problem = version_differences(mine, theirs, "this host", "the controller's host")
        if problem:
            self._log(f"refused {host}: {problem}")
            session.send({"versions": mine})  # the controller compares them, too
        elif "about" in request:
            session.send({"versions": mine, **self._describe_process(request)})
        elif problem := _obstacle(request):
            session.send({"versions": mine, "error": problem})
        else:
            self._begin(session, request, host)

    def _describe_process(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return how a process ended, or its stacks."""
        pid = request.get("pid", 0)
        limit = time.monotonic() + _GRACE
        while time.monotonic() < limit:
            with self._lock:
                if pid in self._ended:
                    code, stacks = self._ended[pid]
                    return {"code": code, "stacks": stacks}
                process, descriptor = self._running.get(pid, (None, -1))
            if process is None:
                break
            if request["about"] == "stacks":
                process.send_signal(signal.SIGUSR1)
                time.sleep(1.0)  # until it has written them
                return {"stacks": _stacks(descriptor)}
            time.sleep(0.05)  # it is about to end
        return {}

    # ── a session ──────────────────────────────────────────────────────────────────────────────────────────────
    def _begin(self, session: AuthenticatedSession, request: dict[str, Any], host: str) -> None:
        device = registry.create_device(request["device"], request["back_end"])
        stacks = os.memfd_create("gemini-stacks", os.MFD_CLOEXEC)
        reader, writer = os.pipe()
        try:
            process = spawn.start_process((session.connection.fileno(), stacks, reader), self._threads, ENTRY)
        finally:
            os.close(reader)
        with self._lock:
            self._running[process.pid] = process, stacks
        try:
            session.send({
                "versions": versions(), "pid": process.pid, "threads": self._threads, "gpu": gpu_identity(device),
                "path": [os.getcwd(), *filter(None, sys.path)],
            })  # fmt: skip
            terms = {key: request[key] for key in ("device", "back_end", "timeout", "gpu")}
            os.write(writer, json.dumps({"key": session.key.hex(), **terms}).encode())  # it may use it now
            os.close(writer)
            self._log(f"process {process.pid} serves {host} on {request['device']}")
            _until_either_ends(process, session.connection)
        finally:
            self._end(process, stacks)

    def _end(self, process: spawn.Process, stacks: int) -> None:
        with contextlib.suppress(Exception):  # it did not exit in time
            process.wait(_GRACE)
        process.kill()
        code = process.wait()
        with self._lock:
            self._running.pop(process.pid)
            self._ended[process.pid] = code, _stacks(stacks)
        os.close(stacks)
        self._log(f"process {process.pid} has ended" + (f" with code {code}" if code else ""))
        os.write(self._waker, b"!")


def _until_either_ends(process: spawn.Process, connection: socket.socket) -> None:
    """Wait until a process has ended or the controller has disconnected."""
    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
    finally:
        os.close(ended)


def _obstacle(request: dict[str, Any]) -> str:
    """Return why this host cannot serve a request; '' if it can."""
    name = str(request.get("device"))
    try:
        reason = registry.create_device(name, request["back_end"]).obstacle()
    except (ConfigError, ImportError, AttributeError, KeyError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    return f"device {name!r}: {reason}\n    → map the worker to a device of that host" if reason else ""


def _stacks(descriptor: int) -> str:
    return os.pread(descriptor, _STACKS, 0).decode(errors="replace").strip()
