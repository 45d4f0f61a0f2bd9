"""A worker as the controller sees it: a process to start, ask, and not to lose sight of.

Every wait ends: with the reply, with the worker's death (its socket closes at once), or when the watchdog's patience
does. Several threads may ask at the same time; whoever waits reads, and what is for another is put in the mailbox.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gemini.capture.regions import Region
from gemini.errors import WorkerError
from gemini.runtime.protocol import Hello, Ready, Stop
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.link import Link

# The kernel ends a worker when the thread that started it ends: so one thread starts them all and never ends.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="gemini-starter")
# Large blocks go back to the system when they are freed: the heaps of several processes cannot lend to each other.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "4194304"}
_SLICE = 0.5  # seconds between looks at the clock while waiting


class Worker:
    """One worker process. Made started; `greet` waits until it is up."""

    def __init__(self, place: int, threads: int, patience: float) -> None:
        self.place, self.threads, self.patience = place, threads, patience
        self.secret = secrets.token_bytes(16)
        self.last = "start"
        self.mailbox: dict[int, Any] = {}
        self._numbers = 0
        self._abandoned: set[int] = set()  # requests whose reply nobody waits for any more
        self._arrival = threading.Condition()
        self._reading = False
        self._counting = threading.Lock()
        ours, theirs = Channel.pair()
        self.process: subprocess.Popen[bytes] = _STARTER.submit(_start, theirs, threads).result()
        theirs.close()
        self.link = Link(Channel(ours))
        self._region: Any = None
        self.link.send(Hello(self.secret, place, threads, list(sys.path), torch.get_default_dtype()))

    def greet(self) -> None:
        """Wait until the worker is up."""
        ready = self._receive(time.monotonic() + self.patience)
        if not isinstance(ready, Ready) or ready.secret != self.secret:
            self.kill()
            raise WorkerError(f"worker {self.place} did not answer as one of ours")

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def next_number(self) -> int:
        """A number for a request."""
        with self._counting:
            self._numbers += 1
            return self._numbers

    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = ()) -> Any:
        """Send a request and wait for its reply."""
        self.last = what
        try:
            self.link.send(request, descriptors)
        except ChannelClosed:
            raise self._death() from None
        try:
            return self._wait(request.number)
        except BaseException:
            self._abandoned.add(request.number)
            raise

    def region_news(self, region: Region) -> Any:
        """A region as plain data, if the worker is not in it already."""
        if region == self._region:
            return None
        self._region = region
        return (region.grad, region.inference, region.autocast)

    def _wait(self, number: int) -> Any:
        """The reply to a request. One thread reads for all; the others look when something has arrived."""
        deadline = time.monotonic() + self.patience
        with self._arrival:
            while number not in self.mailbox and self._reading:
                self._arrival.wait()
            if number in self.mailbox:
                return self.mailbox.pop(number)
            self._reading = True
        try:
            while True:
                reply = self._receive(deadline)
                if reply.number == number:
                    return reply
                with self._arrival:
                    if reply.number in self._abandoned:
                        self._abandoned.discard(reply.number)
                    else:
                        self.mailbox[reply.number] = reply
                        self._arrival.notify_all()
        finally:
            with self._arrival:
                self._reading = False
                self._arrival.notify_all()

    def _receive(self, deadline: float) -> Any:
        while True:
            try:
                found = self.link.receive(_SLICE)
            except ChannelClosed:
                raise self._death() from None
            if found is not None:
                return found[0]
            if time.monotonic() > deadline:
                raise self._hung()

    # ── its end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _death(self) -> WorkerError:
        try:
            code: int | None = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its connection" if code is None else _ending(code)
        return WorkerError(
            f"worker {self.place} (process {self.process.pid}) {how}; it was asked for: {self.last}\n"
            "    → look for its messages above; out of memory shows as signal SIGKILL in the system's log"
        )

    def _hung(self) -> WorkerError:
        self.process.send_signal(signal.SIGUSR1)  # its stacks go to the error output
        time.sleep(0.5)
        self.kill()
        return WorkerError(
            f"worker {self.place} (process {self.process.pid}) did not answer for {self.patience:.0f} s; it was asked "
            f"for: {self.last}; its stacks are above\n    → raise the limit if the work may take that long"
        )

    def kill(self) -> None:
        """End it at once."""
        self.link.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to leave, and make sure that it does."""
        try:
            self.link.send(Stop(self.next_number()))
            self.process.wait(2)
        except (ChannelClosed, subprocess.TimeoutExpired, OSError):
            pass
        self.kill()


def _start(connection: socket.socket, threads: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **_ALLOCATOR}
    command = [sys.executable, "-m", "gemini.runtime.worker.process", str(connection.fileno()), str(os.getpid())]
    try:
        return subprocess.Popen(
            command, pass_fds=(connection.fileno(),), stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    except OSError as error:
        raise WorkerError(f"a worker cannot be started: {error}") from error


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
