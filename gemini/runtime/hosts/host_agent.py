"""Host agent: the supervisor of a worker on another host, as the controller sees it.

    HostAgent         requests to the supervisor, whatever carries them
    RemoteProcess     the worker's process: whether it runs, how it ended, its stacks

A thread asks every `PING` seconds how the process is. A host that does not answer for `SILENCE` seconds is lost: its
link is cut, or it is frozen or without power, which no connection reports by itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from gemini.errors import WorkerError
from gemini.runtime.hosts.host_supervisor import PING, SILENCE

_PATIENCE = 5.0  # seconds for an answer about a process that has ended


class HostAgent(Protocol):
    """Carries requests to the supervisor of one worker."""

    host: str  # as a device mapping names it

    def call(self, method: str, seconds: float, **given: Any) -> dict[str, Any]:
        """Return the answer; raise WorkerError if there is none in time, or the supervisor is gone."""

    def release(self) -> None:
        """End the supervisor; its process ends with it. Does not wait."""


class RemoteProcess:
    """The process of a worker on another host; `on_end` is called by a thread when it has ended, or is lost."""

    def __init__(self, agent: HostAgent, pid: int, on_end: Callable[[], None]) -> None:
        self.agent, self.pid, self.stacks = agent, pid, ""
        self.lost = ""  # why nothing is known about it
        self._code: int | None = None
        self._on_end = on_end
        self._is_released = False
        threading.Thread(target=self._watch, name="gemini-heartbeat", daemon=True).start()

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self._is_released and self.poll() is None:
            began = time.monotonic()
            try:
                self._code = self.agent.call("ping", max(0.5, heard + SILENCE - began))["code"]
                heard = time.monotonic()
            except WorkerError as error:
                silent = time.monotonic() - heard
                self.lost = f"its host has not answered for {silent:.0f} s" if silent > SILENCE - 1 else str(error)
            if self.poll() is None:
                time.sleep(max(0.0, PING - (time.monotonic() - began)))
        if not self._is_released:
            self._on_end()

    def poll(self) -> int | None:
        """Return a code if it has ended, 1 if it is lost; else None."""
        return 1 if self._code is None and self.lost else self._code

    def wait(self, timeout: float) -> int:
        """Return how it ended, as its host reports."""
        if self._code is None and not self.lost:
            with contextlib.suppress(WorkerError):
                answer = self.agent.call("ending", timeout + _PATIENCE)
                self._code, self.stacks = answer["code"], answer["stacks"]
        if self._code is None:
            raise subprocess.TimeoutExpired(self.agent.host, timeout)
        return self._code

    def send_signal(self, number: int) -> None:  # noqa: ARG002
        """Ask its host for the stacks."""
        with contextlib.suppress(WorkerError):
            self.stacks = self.agent.call("dump_stacks", _PATIENCE)["stacks"]

    def kill(self) -> None:
        """End it."""
        if not self._is_released:
            self._is_released = True
            self._code = 0 if self._code is None else self._code
            self.agent.release()
