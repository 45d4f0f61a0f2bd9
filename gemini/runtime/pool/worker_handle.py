"""Worker handle: a worker process as the controller sees it, to start, request and supervise.

Every wait ends: with the reply, with the worker's death (its socket closes immediately), or with the watchdog's
timeout. A lost worker takes the whole pool with it: the model's tensors are in the controller, so the script can
continue without workers. Several threads may send requests at the same time, see `reply_mailbox`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
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
from gemini.runtime.memory.shared_parameters import PlacedModule, SharedParameters
from gemini.runtime.pool.reply_mailbox import ReplyMailbox
from gemini.runtime.pool.signals import GRACE, DeferredSignals, has_pending_signal
from gemini.runtime.pool.worker_failure import STACKS, describe_exit, describe_held, explain_failure, explain_kill
from gemini.runtime.pool.worker_output import replay_output
from gemini.runtime.protocol import UNSOLICITED, DropCalls, Hello, Ready, Stop
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.link import Link, UnreadableMessage

_SLICE = 0.5  # seconds between checks of the time while waiting
START_TIMEOUT = 60.0  # seconds for the start, at least
_STACKS = 20_000  # characters of stacks in an error

_all: weakref.WeakSet[WorkerHandle] = weakref.WeakSet()


class InternalFault(Exception):
    """Gemini's own code failed; the state of the script is as before, and the call can run in the controller."""


def raise_internal_fault(error: Exception, what: str) -> NoReturn:
    """Raise an exception of Gemini's own code as InternalFault, except for the loss of a worker."""
    if isinstance(error, (WorkerError, InternalFault)):
        raise error
    raise InternalFault(f"{what}: {type(error).__name__}: {error}") from error


class WorkerHandle:
    """One worker process of a pool, started by the constructor; `await_ready` waits until it is up."""

    is_remote = False  # shares the memory of this host
    output_location = "above"
    host = ""  # its address, if it is another host

    def __init__(self, index: int, threads: int, timeout: float, team: list[WorkerHandle], device: str = "cpu") -> None:
        self.index, self.timeout, self.team = index, timeout, team
        self.secret = secrets.token_bytes(16)
        self.last = "start"
        self.loss = ""  # why it cannot be used any more
        self.contents: dict[str, str] = {}  # parts of models in words, by model
        self._kills = count_oom_kills()
        self.mailbox = ReplyMailbox()
        self.pending_error: BaseException | None = None  # a warning turned into one
        self._numbers = itertools.count(1)
        self._last_modes: tuple[Any, bytes] = (None, b"")  # region and generator state of the last call
        self.sending = threading.Lock()
        self.clock_offset = 0.0  # seconds from its clock to that of this process
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
        with DeferredSignals():  # a signal must not leave an untracked process
            self.process = spawn.start_process((theirs.fileno(), self.stacks), threads)
            self.team.append(self)
        theirs.close()
        self._say_hello(threads, list(sys.path), device)

    def _say_hello(self, threads: int, path: list[str], device: str) -> None:
        with contextlib.suppress(ChannelClosed):  # `await_ready` reports how it ended
            limit, dtype, back_end = sys.getrecursionlimit(), torch.get_default_dtype(), class_path(device)
            self.link.send(Hello(self.secret, self.index, threads, path, dtype, limit, device, back_end))

    @property
    def title(self) -> str:
        """Its name in errors."""
        return f"worker {self.index} (process {self.process.pid})"

    def await_ready(self) -> None:
        """Wait until the worker is up."""
        ready = self._receive(max(self.timeout, START_TIMEOUT))
        if not isinstance(ready, Ready) or ready.secret != self.secret:
            raise self._lose(f"worker {self.index} sent an unexpected first message: {ready!r:.100}")
        self.clock_offset = time.perf_counter() - ready.clock if self.is_remote else 0.0  # late by one message
        self.link.set_device(self.device)

    @property
    def has_reply(self) -> bool:
        """Whether a message, or the end of the worker, can be read at once."""
        channel = self.link.channel
        return channel.has_more or bool(select.select([channel], [], [], 0)[0])

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def next_number(self) -> int:
        """Return a number for a request."""
        return next(self._numbers)

    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """Send a request and wait for its reply. Raise InternalFault, with the state unchanged, if it cannot be sent.

        A request with changes that the worker has not seen yet is given as a function: it is built when it is sent, so
        that no other thread's request, which relies on them, is sent before.
        """
        if self.loss:
            raise WorkerError(self.loss)
        self.last = what
        with DeferredSignals():
            try:
                with self.sending:
                    try:
                        request = request() if callable(request) else request
                        self.transmit(request, descriptors)
                    except BaseException:
                        self._last_modes = (None, b"")
                        raise
                reply = self.wait_reply(request.number, max(timeout, self.timeout))
            except ChannelClosed:
                raise self.report_death() from None
            except WorkerError:
                raise
            except BaseException as error:
                if isinstance(error, Exception) and not self.link.channel.is_broken:
                    raise InternalFault(f"{what} cannot be requested: {type(error).__name__}: {error}") from error
                self._lose(f"worker {self.index} was interrupted by {type(error).__name__} in {what}")
                raise
        self.check_reply(reply, what)
        if self.pending_error is not None:
            pending, self.pending_error = self.pending_error, None
            raise InternalFault(f"a warning was turned into an error: {pending}")
        return reply

    def transmit(self, request: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a request; the thread has the right to send."""
        self.link.send(request, descriptors)

    def check_reply(self, reply: Any, what: str) -> None:
        """Raise InternalFault for a reply that cannot be rebuilt, or for a request that could not be sent."""
        if isinstance(reply, UnreadableMessage):
            raise InternalFault(f"the reply of worker {self.index} to {what} cannot be read: {reply.reason}")
        if isinstance(reply, InternalFault):
            raise reply

    def encode_modes(self, region: Region, generator: bytes) -> tuple[Any, bytes]:
        """Return the autograd region, with torch's flags, and the generator state, each only if it has changed.

        Threads may be in different regions: call this while the request is built.
        """
        plain = (region.grad, region.inference, region.autocast, torch_flags.current_flags())
        known, self._last_modes = self._last_modes, (plain, generator)
        return None if plain == known[0] else plain, b"" if generator == known[1] else generator

    def wait_reply(self, number: int, timeout: float) -> Any:
        """Wait for the reply to a request."""
        return self.mailbox.wait_for(number, partial(self._receive, timeout))

    def _receive(self, timeout: float) -> Any:
        """Return the next reply of the worker; handle unsolicited messages on the way."""
        deadline = leave = 0.0  # set after the first empty wait: most replies need no clock
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
                raise self._lose(f"worker {self.index} was killed: an interrupt waited too long for {self.last}")

    def handle_unsolicited(self, news: Any) -> None:
        """Repeat output of the worker in this process; the next `ask` raises an error that it causes."""
        try:
            replay_output(news)
        except Exception as error:
            self.pending_error = error

    def pop_gradients(self, step: int) -> dict[tuple[int, int], torch.Tensor]:  # noqa: ARG002
        """Return the gradients of a step that have arrived before its reply: none in shared memory."""
        return {}

    def drop(self, calls: list[int]) -> None:
        """Send graphs that are no longer needed, without a request."""
        with contextlib.suppress(ChannelClosed):  # the next request reports how it ended
            self.link.send(DropCalls(0, calls))

    # ── the model's tensors ────────────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, module: PlacedModule) -> bool:
        """Give the worker access to a module's tensors; return whether it must be sent new ones.

        Raise MisplacedTensor if a tensor cannot be shared.
        """
        return module.shared_parameters.ensure_shared(module.tensors, self.device)

    def ensure_stages_shared(self, program: int, tensors: list[torch.Tensor], shared: SharedParameters) -> bool:  # noqa: ARG002
        """Give the worker access to the tensors of its stages; return whether it must be sent the stages again."""
        return shared.ensure_shared(tensors, self.device)

    def stage_numbers(self, program: int) -> dict[int, int]:  # noqa: ARG002
        """Return the numbers of the tensors of the stages of a program, by identity."""
        return self.link.shared_numbers

    def release_module(self, module: PlacedModule) -> None:
        """Release a module that runs in the controller from now on."""
        module.shared_parameters.release(module.tensors)

    def forget_modules(self, modules: list[int]) -> None:
        """Forget modules of a deleted model: nothing to do in shared memory. Runs in any thread, at any time."""

    # ── its end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _lose(self, reason: str) -> WorkerError:
        """End the whole pool; from now on its handles only report the reason."""
        for one in list(self.team):
            one.loss = one.loss or reason
        for one in list(self.team):
            one.kill()
        return WorkerError(self.loss)

    def report_death(self) -> WorkerError:
        """End the pool after the death of this worker, and return the error."""
        if self.loss:
            return WorkerError(self.loss)
        try:
            how = describe_exit(self.process.wait(3))
        except subprocess.TimeoutExpired:
            how = "has closed its connection"
        facts, remedy = (
            describe_held(self.contents),
            f"see its messages {self.output_location}; fewer workers or smaller batches may help",
        )
        trace = self._read_stacks()
        if "SIGKILL" in how:
            facts, remedy = self._explain_kill()
        elif trace.startswith("Traceback"):
            facts, remedy = explain_failure(trace, self.contents)
        return self._lose(
            f"{self.title} {how}; its last action: {self.last}; {facts}"
            + (f"{STACKS}\n{trace}" if trace else "")
            + f"\n    → {remedy}"
        )

    def _explain_kill(self) -> tuple[str, str]:
        """Return the facts about its end by SIGKILL, and a remedy."""
        return explain_kill(self.contents, self._kills)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped its process on this host."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False

    def report_hang(self, timeout: float) -> WorkerError:
        """End the pool after a timeout of this worker, and return the error with its stacks."""
        if self.loss:
            return WorkerError(self.loss)
        if self.is_stopped:
            return self._lose(
                f"{self.title} did not reply for {timeout:.0f} s: a signal has stopped its process; "
                f"its last action: {self.last}; {describe_held(self.contents)}"
                "\n    → find out who sent SIGSTOP, and run again"
            )
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
        trace, ends = "", time.monotonic() + 3
        while time.monotonic() < ends:
            time.sleep(0.1)
            before, trace = trace, self._read_stacks()
            if trace and trace == before:
                break
        return self._lose(
            f"{self.title} did not reply for {timeout:.0f} s; its last action: {self.last}; "
            f"{describe_held(self.contents)}"
            + (f"{STACKS}\n{trace}" if trace else "; it has no stacks")
            + "\n    → if the work can take that long, raise the limit: GeminiConfig(watchdog=SECONDS)"
        )

    def _read_stacks(self) -> str:
        return os.pread(self.stacks, _STACKS, 0).decode(errors="replace").strip()

    def kill(self) -> None:
        """End it immediately. Threads that wait for it wake up."""
        self.loss = self.loss or f"worker {self.index} has been stopped"
        with contextlib.suppress(OSError):
            self.link.channel.connection.shutdown(socket.SHUT_RDWR)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if not self.mailbox.has_reader:
            self.link.close()
            self.link.transport.forget()  # the model may live on with references to its workers

    def request_stop(self) -> None:
        """Ask it to exit."""
        if not self.loss:
            self.link.channel.set_send_timeout(1.0)
            with contextlib.suppress(ChannelClosed):
                self.link.send(Stop(0), wait=False)

    def await_exit(self, deadline: float) -> None:
        """Wait for its exit until the deadline and repeat its last output; then kill it."""
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
    """Track a worker with open connections."""
    _all.add(worker)


def _forget_in_child() -> None:
    """Close connections in a forked process, or a worker would not notice the end of its controller."""
    for worker in list(_all):
        worker.loss = "it belongs to another process"
        worker.link.close()
        with contextlib.suppress(OSError):
            os.close(worker.stacks)
    _all.clear()  # a process forked by this one must not close the numbers again: they may be those of other files


os.register_at_fork(after_in_child=_forget_in_child)
