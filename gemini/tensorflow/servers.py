"""Servers: the processes that run the stages and shards of a graph, and the session target that reaches them.

    script's process, task 0                      server process, task 1 …
    servers_for(config)      start, no waiting ─→ imports TensorFlow, listens on the loopback interface
    servers.target           own server, waits ←─ ready
    session = tf.Session(target)             ⇄    runs the operations placed on its devices
    a thread                 sees the socket close when a server dies; `explained()` names it

Where all devices belong to the script's process there are no servers: the target is that of the script, and
`session_settings` adds the logical CPU devices. Servers end with the process of the script, whatever ends it.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault, WorkerError
from gemini.runtime.hosts.spawn import Process, start_process
from gemini.tensorflow.graph_devices import GraphDevices, graph_devices
from gemini.tensorflow.server_process import free_ports

_ENTRY = "gemini.tensorflow.server_process"
_START_SECONDS = 120.0
_NOTICE_SECONDS = 1.5  # from the error of a step to the news of a server's death
_LOST = frozenset({"UnavailableError", "AbortedError", "InternalError", "CancelledError", "UnknownError"})


@dataclass
class ServerProcess:
    """A server process and the socket to it."""

    task: int
    process: Process
    connection: socket.socket
    is_ready: threading.Event = field(default_factory=threading.Event)
    reason: str = ""

    def __str__(self) -> str:
        return f"server {self.task} (process {self.process.pid})"


class Servers:
    """The devices of a configuration and the servers behind them; the target is `given` where there are none."""

    def __init__(self, devices: GraphDevices) -> None:
        self.devices = devices
        self.cluster: dict[str, list[str]] = {}
        self._is_eager = False
        self._owner = os.getpid()
        self._own_server: Any = None
        self._processes: list[ServerProcess] = []
        self._dead = threading.Event()
        self._lock = threading.Lock()
        if devices.tasks > 1:
            self._start()

    # ── for sessions ───────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def is_remote(self) -> bool:
        """Whether sessions connect to servers."""
        return self.devices.tasks > 1

    @property
    def target(self) -> str:
        """The target of sessions; waits until every server is ready. Empty where the graph runs in this process."""
        if not self.is_remote:
            return ""
        if self._is_eager:
            self.check()
            return f"grpc://{self.cluster[self.devices.job][0]}"
        with self._lock:
            if self._own_server is None:
                from gemini.tensorflow.server_process import make_server

                self._own_server = make_server(self._order(0))
                self.wait_until_ready()
        self.check()
        return str(self._own_server.target)

    @property
    def has_own_server(self) -> bool:
        """Whether this process has a server of its own, for sessions."""
        return self._own_server is not None

    def wait_until_ready(self) -> None:
        """Wait for every server process; raise WorkerError for one that does not start."""
        for one in self._processes:
            if not one.is_ready.wait(_START_SECONDS):
                one.reason = one.reason or f"not ready after {_START_SECONDS:.0f} s"
            if one.reason:
                raise WorkerError(f"{one} did not start: {one.reason}")

    def eager_runtime_joins(self) -> None:
        """Note that the eager runtime of this process is task 0, which serves sessions too."""
        self._is_eager = True

    def session_settings(self, settings: Any = None) -> Any:
        """Return a copy of a `ConfigProto` (None: the default one) with the logical devices of this process."""
        import tensorflow.compat.v1 as tf

        result = tf.ConfigProto()
        if settings is not None:
            result.CopyFrom(settings)
        if not self.is_remote:
            result.device_count["CPU"] = max(self.devices.cpus(), result.device_count.get("CPU", 1))
        return result

    def check_devices(self, session: Any) -> None:
        """Raise ConfigError where a session lacks one of the devices."""
        present = [one.name.replace("/job:localhost/replica:0/task:0", "") for one in session.list_devices()]
        missing = sorted({str(device) for device in self.devices} - set(present))
        faults = [Fault(f"no device {name}", f"the devices are {', '.join(present)}") for name in missing]
        if faults:
            raise ConfigError(faults, "device_mapping")

    # ── failures ───────────────────────────────────────────────────────────────────────────────────────────────────
    def check(self) -> None:
        """Raise WorkerError if a server has ended."""
        if self._dead.is_set():
            raise self._failure()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Run a step: an error of TensorFlow that comes from the end of a server is raised as a WorkerError."""
        self.check()
        try:
            yield
        except Exception as error:
            is_lost = self.is_remote and type(error).__name__ in _LOST
            if is_lost and self._dead.wait(_NOTICE_SECONDS):
                raise self._failure() from error
            raise

    def _failure(self) -> WorkerError:
        _abandon_sessions()
        ended = [f"{one} {one.reason}" for one in self._processes if one.reason]
        return WorkerError(
            f"{' and '.join(ended)}\n    → its variables are lost: start the script again from its last checkpoint"
        )

    # ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self) -> None:
        ports = free_ports(self.devices.tasks)
        self.cluster = {self.devices.job: [f"127.0.0.1:{port}" for port in ports]}
        for task in range(1, self.devices.tasks):
            own, other = socket.socketpair()
            with other:
                process = start_process((other.fileno(),), self._threads, _ENTRY)
            own.sendall((json.dumps(self._order(task)) + "\n").encode())
            self._processes.append(ServerProcess(task, process, own))
        threading.Thread(target=self._watch, name="gemini-servers", daemon=True).start()
        atexit.register(self.close)

    @property
    def _threads(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // self.devices.tasks)

    def _order(self, task: int) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "job": self.devices.job,
            "task": task,
            "cpus": self.devices.cpus(task),
            "threads": self._threads,
        }

    def _watch(self) -> None:
        """Record which servers are ready, and which have ended."""
        with selectors.DefaultSelector() as selector:
            for one in self._processes:
                selector.register(one.connection, selectors.EVENT_READ, one)
            while selector.get_map():
                for key, _ in selector.select():
                    one = key.data
                    data = b""
                    with suppress(OSError):
                        data = one.connection.recv(1 << 16)
                    if data:
                        one.reason = json.loads(data)["reason"]
                    else:
                        selector.unregister(key.fileobj)
                        one.reason = one.reason or _how_it_ended(one.process)
                        self._dead.set()
                    one.is_ready.set()

    def close(self) -> None:
        """End the servers of this process."""
        if os.getpid() != self._owner:
            return
        if self._dead.is_set():
            _abandon_sessions()  # those of steps whose error nothing explained
        for one in self._processes:
            with suppress(OSError):
                one.connection.shutdown(socket.SHUT_RDWR)
        for one in self._processes:
            one.process.kill()
            one.process.wait()


def _how_it_ended(process: Process) -> str:
    try:
        code = process.wait(1.0)
    except Exception:  # it lives, with its socket closed
        return "closed its connection"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _abandon_sessions() -> None:
    """Leave the sessions of this process as they are: closing one after its server died would wait forever."""
    import ctypes

    for one in open_sessions():
        if one._session is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one._session))  # no destructor
            one._session, one._closed = None, True


def open_sessions() -> list[Any]:
    """Return the sessions of this process that are not closed."""
    import gc

    from tensorflow.python.client.session import BaseSession

    return [one for one in gc.get_objects() if issubclass(type(one), BaseSession) and not one._closed]


_servers: dict[GraphDevices, Servers] = {}


def servers_for(config: GeminiConfig) -> Servers:
    """Return the servers of a configuration, started on first use and shared by all sessions of this process."""
    devices = graph_devices(config)
    if devices not in _servers or _servers[devices]._owner != os.getpid():
        _servers[devices] = Servers(devices)
    return _servers[devices]
