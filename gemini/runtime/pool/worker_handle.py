"""A worker as the controller sees it: a process to start, ask, and not to lose sight of.

Every wait ends: with the reply, with a worker's death (its socket closes at once), or with the watchdog's timeout. A
worker that is lost takes its team with it: the model's tensors are here, so the program can go on without them.
Several threads may ask at the same time; whoever waits reads, and what is for another is put in the mailbox.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any, NoReturn

import torch

from gemini.capture import torch_flags
from gemini.errors import WorkerError
from gemini.ir.autograd_modes import Region
from gemini.runtime.devices.host_memory import count_oom_kills
from gemini.runtime.devices.registry import class_path, create_device
from gemini.runtime.hosts import spawn
from gemini.runtime.memory.shared_parameters import PlacedModule
from gemini.runtime.pool.reply_mailbox import ReplyMailbox
from gemini.runtime.pool.signals import GRACE, DeferredSignals, has_pending_signal
from gemini.runtime.pool.worker_failure import describe_exit, explain_failure, explain_kill
from gemini.runtime.pool.worker_output import replay_output
from gemini.runtime.protocol import UNSOLICITED, DropCalls, Hello, Ready, Stop
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.link import Link, UnreadableMessage

_SLICE = 0.5  # seconds between looks at the clock while waiting
START_TIMEOUT = 60.0  # seconds for the start, at the least
_STACKS = 20_000  # characters of stacks in an error

_all: weakref.WeakSet[WorkerHandle] = weakref.WeakSet()


class InternalFault(Exception):
    """Something of ours failed; the program's state is as before, and the call can be made here instead."""


def raise_internal_fault(error: Exception, what: str) -> NoReturn:
    """Raise what an exception of code of ours alone is: our fault, but for the loss of a worker."""
    if isinstance(error, (WorkerError, InternalFault)):
        raise error
    raise InternalFault(f"{what}: {type(error).__name__}: {error}") from error


class WorkerHandle:
    """One worker process of a team. Made started; `greet` waits until it is up."""

    is_remote = False  # it shares the memory of this host
    output_location = "above"

    def __init__(self, index: int, threads: int, timeout: float, team: list[WorkerHandle], device: str = "cpu") -> None:
        self.index, self.timeout, self.team = index, timeout, team
        self.secret = secrets.token_bytes(16)
        self.last = "start"
        self.loss = ""  # why it cannot be asked any more
        self.holds: dict[str, str] = {}  # what it has of models, in words, by model
        self._kills = count_oom_kills()
        self.mailbox = ReplyMailbox()
        self.pending_error: BaseException | None = None  # a warning that the program has made an error
        self._numbers = itertools.count(1)
        self._told: tuple[Any, bytes] = (None, b"")  # region and generator that the last call named
        self.sending = threading.Lock()
        self._start(threads, device)

    def _start(self, threads: int, device: str) -> None:
        """Start the process."""
        self.device = create_device(device)
        ours, theirs = Channel.pair()
        self.link = Link(Channel(ours))
        self.link.channel.set_send_timeout(max(self.timeout, START_TIMEOUT))
        self.stacks = os.memfd_create("gemini-stacks", os.MFD_CLOEXEC)
        weakref.finalize(self, _close, self.stacks, os.getpid()).atexit = False
        track_worker(self)
        with DeferredSignals():  # or a process would be started that nobody knows
            self.process = spawn.start_process((theirs.fileno(), self.stacks), threads)
            self.team.append(self)
        theirs.close()
        self._say_hello(threads, list(sys.path), device)

    def _say_hello(self, threads: int, path: list[str], device: str) -> None:
        with contextlib.suppress(ChannelClosed):  # `greet` says how it ended
            limit, dtype, back_end = sys.getrecursionlimit(), torch.get_default_dtype(), class_path(device)
            self.link.send(Hello(self.secret, self.index, threads, path, dtype, limit, device, back_end))

    @property
    def title(self) -> str:
        """What it is called in errors."""
        return f"worker {self.index} (process {self.process.pid})"

    def await_ready(self) -> None:
        """Wait until the worker is up."""
        ready = self._receive(max(self.timeout, START_TIMEOUT))
        if not isinstance(ready, Ready) or ready.secret != self.secret:
            raise self._lose(f"worker {self.index} did not answer as one of ours: {ready!r:.100}")
        self.link.set_device(self.device)

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def next_number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """Send a request and wait for its reply. OurFault: it cannot be sent, and everything is as it was.

        A request that says what the worker does not know yet is given as a function: it is made when it is sent, so
        that no other thread's request, which relies on it, can be sent before.
        """
        if self.loss:
            raise WorkerError(self.loss)
        self.last = what
        with DeferredSignals():
            try:
                with self.sending:
                    try:
                        request = request() if callable(request) else request
                        self.link.send(request, descriptors)
                    except BaseException:
                        self._told = (None, b"")
                        raise
                reply = self.wait_reply(request.number, max(timeout, self.timeout))
            except ChannelClosed:
                raise self.report_death() from None
            except WorkerError:
                raise
            except BaseException as error:
                if isinstance(error, Exception) and not self.link.channel.is_broken:
                    raise InternalFault(f"{what} cannot be asked for: {type(error).__name__}: {error}") from error
                self._lose(f"worker {self.index} was interrupted by {type(error).__name__} in {what}")
                raise
        self.check_reply(reply, what)
        if self.pending_error is not None:
            complaint, self.pending_error = self.pending_error, None
            raise InternalFault(f"a warning is to be an error: {complaint}")
        return reply

    def check_reply(self, reply: Any, what: str) -> None:
        """Raise InternalFault for a reply that cannot be rebuilt, or for a request that could not be sent."""
        if isinstance(reply, UnreadableMessage):
            raise InternalFault(f"the reply of worker {self.index} to {what} cannot be read: {reply.reason}")
        if isinstance(reply, InternalFault):
            raise reply

    def tell(self, region: Region, generator: bytes) -> tuple[Any, bytes]:
        """What a call names of its region, with the switches of torch, and generator: only what is not as in the last.

        Several threads may each be in a region of their own: to be called when the request is made.
        """
        plain = (region.grad, region.inference, region.autocast, torch_flags.current_flags())
        known, self._told = self._told, (plain, generator)
        return None if plain == known[0] else plain, b"" if generator == known[1] else generator

    def wait_reply(self, number: int, timeout: float) -> Any:
        """The reply to a request. One thread reads for all; the others look when something has arrived."""
        return self.mailbox.wait_for(number, partial(self._receive, timeout))

    def _receive(self, timeout: float) -> Any:
        """The next reply, whoever waits for it; news on the way are repeated."""
        deadline = leave = 0.0  # not looked at yet: most replies are there before anybody asks for the time
        while True:
            try:
                found = self.link.receive(_SLICE)
            except ChannelClosed:
                raise self.report_death() from None
            if found is not None:
                if type(found[0]) not in UNSOLICITED:
                    return found[0]
                deadline = 0.0
                self.handle_unsolicited(found[0])
                continue
            now = time.monotonic()
            deadline = deadline or now - _SLICE + timeout
            for other in self.team:
                if other.loss or other.process.poll() is not None:
                    raise other.report_death()
            if now > deadline:
                raise self.report_hang(timeout)
            leave = leave or (now + GRACE if has_pending_signal() else 0.0)
            if leave and now > leave:
                raise self._lose(f"worker {self.index} was ended: an interrupt did not wait longer for {self.last}")

    def handle_unsolicited(self, news: Any) -> None:
        try:
            replay_output(news)
        except Exception as error:
            self.pending_error = error

    def drop(self, calls: list[int]) -> None:
        """Tell it of graphs that nobody needs any more, where it is not to be asked for anything."""
        with contextlib.suppress(ChannelClosed):  # whoever asks next says how it ended
            self.link.send(DropCalls(0, calls))

    # ── the model's tensors ────────────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, unit: PlacedModule) -> bool:
        """See to it that it has a unit's tensors; whether it must be told of other ones. Raises Astray."""
        return unit.shared_parameters.ensure_shared(unit.held, self.device)

    def leave(self, unit: PlacedModule) -> None:
        """A unit runs in the program's process now."""
        unit.shared_parameters.let_go(unit.held)

    def forget(self, units: list[int]) -> None:
        """Units of a model that is gone: nothing to do, in shared memory. In any thread, at any time."""

    # ── its end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _lose(self, reason: str) -> WorkerError:
        """End the team; from now on its workers only say why."""
        for one in list(self.team):
            one.loss = one.loss or reason
        for one in list(self.team):
            one.kill()
        return WorkerError(self.loss)

    def report_death(self) -> WorkerError:
        if self.loss:
            return WorkerError(self.loss)
        try:
            how = describe_exit(self.process.wait(3))
        except subprocess.TimeoutExpired:
            how = "has closed its connection"
        facts, remedy = "", f"see its messages {self.output_location}; fewer workers or smaller batches may help"
        trace = self._read_stacks()
        if "SIGKILL" in how:
            facts, remedy = self._killed()
        elif trace.startswith("Traceback"):
            facts, remedy = explain_failure(trace, self.holds)
        return self._lose(
            f"{self.title} {how}; its last action: {self.last}"
            + (f"; {facts}" if facts else "")
            + (f"; its stacks:\n{trace}" if trace else "")
            + f"\n    → {remedy}"
        )

    def _killed(self) -> tuple[str, str]:
        """What is known of its end by SIGKILL, and what to do."""
        return explain_kill(self.holds, self._kills)

    def report_hang(self, timeout: float) -> WorkerError:
        if self.loss:
            return WorkerError(self.loss)
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
        trace, ends = "", time.monotonic() + 3
        while time.monotonic() < ends:
            time.sleep(0.1)
            before, trace = trace, self._read_stacks()
            if trace and trace == before:
                break
        return self._lose(
            f"{self.title} did not answer for {timeout:.0f} s; its last action: "
            f"{self.last}; its stacks:\n{trace or '  (it gave none: it may be stopped)'}\n"
            "    → if the work may take that long, raise the limit: GeminiConfig(watchdog=SECONDS)"
        )

    def _read_stacks(self) -> str:
        return os.pread(self.stacks, _STACKS, 0).decode(errors="replace").strip()

    def kill(self) -> None:
        """End it at once. Threads that wait for it wake up."""
        self.loss = self.loss or f"worker {self.index} has been stopped"
        with contextlib.suppress(OSError):
            self.link.channel.connection.shutdown(socket.SHUT_RDWR)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if not self.mailbox.has_reader:
            self.link.close()
            self.link.transport.forget()  # the model may live on, and knows its workers

    def request_stop(self) -> None:
        """Ask it to leave."""
        if not self.loss:
            self.link.channel.set_send_timeout(1.0)
            with contextlib.suppress(ChannelClosed):
                self.link.send(Stop(0), wait=False)

    def await_exit(self, deadline: float) -> None:
        """Make sure that it leaves; what it still has to say is heard if it is in time."""
        try:
            while not self.loss and not self.mailbox.has_reader:
                found = self.link.receive(max(0.0, deadline - time.monotonic()))
                if found is None:
                    break
                if isinstance(found[0], UNSOLICITED):
                    self.handle_unsolicited(found[0])
        except ChannelClosed:
            pass
        self.kill()


def _close(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def track_worker(worker: WorkerHandle) -> None:
    """A worker with open connections."""
    _all.add(worker)


def _forget_in_child() -> None:
    """A forked process must not keep the connections open, or a worker would not notice its controller's end."""
    for worker in list(_all):
        worker.loss = "it belongs to another process"
        worker.link.close()
        with contextlib.suppress(OSError):
            os.close(worker.stacks)


os.register_at_fork(after_in_child=_forget_in_child)
