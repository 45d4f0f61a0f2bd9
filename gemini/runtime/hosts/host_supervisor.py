"""Host supervisor: starts and watches the process of one worker on another host, on behalf of the controller.

    controller ──── describe, start, ping, ending, stacks, kill ───► supervisor ──starts──► the worker's process
                                                                         │
               ◄──── frames and tensors, directly (gloo) ──────────────────────────────────┘

Arguments and answers are plain data. What carries them is not decided here: an actor of Ray, or a store of
torch.distributed. The supervisor imports no framework, and its threads never run user code, so it answers while the
worker computes. A controller that has not been heard of for `SILENCE` seconds is gone: the process is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gemini.runtime.hosts import spawn
from gemini.runtime.hosts.code_versions import versions

ENTRY = "gemini.runtime.hosts.host_session"
PING = 1.5  # seconds between two signs of life of the controller
SILENCE = 7.0  # seconds after which either side counts as lost
_GRACE = 3.0  # seconds in which a process may exit by itself
_STACKS = 20_000  # characters


class HostSupervisor:
    """Answers the requests of one controller for one worker."""

    def __init__(self, address: str, on_silence: Callable[[], None]) -> None:
        self._address, self._on_silence = address, on_silence
        self._process: spawn.Process | None = None
        self._stacks = -1
        self._heard = time.monotonic()
        self._is_released = False  # the controller needs it no more, and is silent
        threading.Thread(target=self._watch, name="gemini-watch", daemon=True).start()

    def answer(self, method: str, **given: Any) -> dict[str, Any]:
        """Answer one request; an unknown method is an AttributeError."""
        self._heard = time.monotonic()
        found: dict[str, Any] = getattr(self, f"_{method}")(**given)
        return found

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    def _watch(self) -> None:
        """Wait for the silence of the controller. A host that was frozen gives it another chance."""
        while True:
            before = time.monotonic()
            time.sleep(0.5)
            if self._is_released:
                return
            if time.monotonic() - before > 2.0:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > SILENCE + PING:
                self.end()
                self._on_silence()
                return

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _describe(self) -> dict[str, Any]:
        return {"versions": versions(), "host": self._address, "cores": len(os.sched_getaffinity(0))}

    def _start(self, threads: int, terms: dict[str, Any]) -> dict[str, Any]:
        """Start the process; `terms` is what it must know to connect."""
        self._stacks = os.memfd_create("gemini-stacks", os.MFD_CLOEXEC)
        reader, writer = os.pipe()
        try:
            self._process = spawn.start_process((self._stacks, reader), threads, ENTRY)
        finally:
            os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump({**terms, "host": self._address}, pipe)
        threading.Thread(target=self._process.wait, daemon=True).start()
        return {"pid": self._process.pid, "path": [os.getcwd(), *filter(None, sys.path)]}

    def _ping(self) -> dict[str, Any]:
        return {"code": None if self._process is None else self._process.poll()}

    def _ending(self) -> dict[str, Any]:
        """Return how the process ended, waiting a moment for its end; no code if it has not."""
        limit = time.monotonic() + _GRACE
        while self._process is not None and self._process.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
        return {**self._ping(), "stacks": self._read_stacks()}

    def _dump_stacks(self) -> dict[str, Any]:
        """Return the stacks of the running process."""
        with contextlib.suppress(OSError):
            if self._process is not None:
                self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)  # until it has written them
        return {"stacks": self._read_stacks()}

    def _kill(self) -> dict[str, Any]:
        self._is_released = True
        self.end()
        return {}

    def _read_stacks(self) -> str:
        return os.pread(self._stacks, _STACKS, 0).decode(errors="replace").strip() if self._stacks >= 0 else ""
