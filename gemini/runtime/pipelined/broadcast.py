"""Broadcast: one request to several workers at once, and their replies in the order of arrival.

A worker may wait for another that has failed, so no worker is waited for alone. When one fails, or the script is
interrupted, the others receive a request to abandon the step; when all have replied, everything is as before.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from operator import attrgetter, is_
from typing import Any

from gemini.errors import WorkerError
from gemini.runtime.pool.signals import GRACE, DeferredSignals, has_pending_signal
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import UNSOLICITED
from gemini.runtime.transport.channel import ChannelClosed

_LINK = attrgetter("link")
_SLICE = 2000  # milliseconds between checks of the deadline


class Broadcast:
    """Some workers of a pool that receive requests together."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self.workers = list(workers)
        self._poller: _Poller | None = None

    def ask(
        self,
        requests: dict[WorkerHandle, Any],
        what: str,
        is_failure: Callable[[Any], bool],
        abandon: Callable[[int], Any],
        timeout: float = 0.0,
    ) -> dict[WorkerHandle, Any]:
        """Return the replies of all workers. After the first failure the workers get the request that `abandon` makes.

        All have then undone the request, and only failures are returned; None for the others.
        """
        reading: list[WorkerHandle] = []
        with DeferredSignals():
            try:
                for worker in requests:
                    if worker.loss:
                        raise WorkerError(worker.loss)
                    worker.last = what
                    worker.mailbox.acquire_reader()
                    reading.append(worker)
                return self._exchange(requests, is_failure, abandon, timeout)
            except ChannelClosed:
                raise self._find_dead() from None
            finally:
                for worker in reversed(reading):
                    worker.mailbox.release_reader()

    def _exchange(
        self, requests: dict[WorkerHandle, Any], is_failure: Callable[[Any], bool], abandon: Callable[[int], Any],
        timeout: float,
    ) -> dict[WorkerHandle, Any]:  # fmt: skip
        expected: dict[tuple[WorkerHandle, int], str] = {}
        replies: dict[WorkerHandle, Any] = {}
        has_failed = self._send(requests, expected, replies)
        abandoned, leave = False, 0.0
        deadline = time.monotonic() + max(timeout, *(worker.timeout for worker in requests))
        if self._poller is None or not self._poller.covers(requests):
            self._poller = _Poller(requests)
        poller = self._poller
        while expected:
            if has_pending_signal():  # a signal waits at most this long
                leave = leave or time.monotonic() + GRACE
            if (has_failed or (leave and time.monotonic() > leave)) and not abandoned:
                abandoned = True
                for worker in requests:
                    request = abandon(worker.next_number())
                    worker.link.send(request)
                    expected[worker, request.number] = "abandon"
                deadline = time.monotonic() + max(timeout, *(worker.timeout for worker in requests))
            received = self._receive(poller, deadline, {worker for worker, _ in expected})
            for worker, reply in received:
                kind = expected.pop((worker, reply.number), "")
                if kind == "step":
                    replies[worker] = reply
                    has_failed = has_failed or is_failure(reply)
                elif not kind:
                    worker.mailbox.put(reply)
        return dict.fromkeys(requests) | select_failures(replies, is_failure) if abandoned else replies

    def _send(
        self,
        requests: dict[WorkerHandle, Any],
        expected: dict[tuple[WorkerHandle, int], str],
        replies: dict[WorkerHandle, Any],
    ) -> bool:
        """Send all requests; return whether one failed, which is then its reply. No worker starts early."""
        with ExitStack() as stack:
            for worker in reversed(requests):
                worker.link.channel.cork()
                stack.callback(worker.link.channel.uncork)
            return self._write(requests, expected, replies)

    def _write(
        self,
        requests: dict[WorkerHandle, Any],
        expected: dict[tuple[WorkerHandle, int], str],
        replies: dict[WorkerHandle, Any],
    ) -> bool:
        for worker, request in requests.items():
            try:
                with worker.sending:
                    worker.transmit(request)
                expected[worker, request.number] = "step"
            except ChannelClosed:
                raise
            except Exception as error:
                replies[worker] = InternalFault(f"a step cannot be requested: {type(error).__name__}: {error}")
                return True
        return False

    def _receive(self, poller: _Poller, deadline: float, awaited: set[WorkerHandle]) -> list[tuple[WorkerHandle, Any]]:
        received = []
        for worker in poller.wait():
            found = worker.link.receive(0)
            while found is not None:
                if isinstance(found[0], UNSOLICITED):
                    worker.handle_unsolicited(found[0])
                else:
                    received.append((worker, found[0]))
                # Unread messages are found by the next poll.
                found = worker.link.receive(0) if worker.link.channel.has_more else None
        if not received:
            self._check_alive(poller.workers, deadline, awaited)
        return received

    def _check_alive(self, workers: Sequence[WorkerHandle], deadline: float, awaited: set[WorkerHandle]) -> None:
        """Raise where a worker has died or the deadline has passed, after a wait without a reply."""
        for worker in workers:
            if worker.loss or worker.process.poll() is not None:
                raise worker.report_death()
        if time.monotonic() > deadline:
            silent = [worker for worker in workers if worker in awaited]
            late = next((worker for worker in silent if worker.is_stopped), silent[0])  # others wait for a stopped one
            raise late.report_hang(late.timeout)

    def _find_dead(self) -> WorkerError:
        """Return the error of the worker whose end closed a connection; its exit may show a moment later."""
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            for worker in self.workers:
                if worker.loss or worker.process.poll() is not None:
                    return worker.report_death()
            time.sleep(0.01)
        return self.workers[0].report_death()


class _Poller:
    """Waits for messages of some workers."""

    def __init__(self, workers: Iterable[WorkerHandle]) -> None:
        self.workers = list(workers)
        self._links = [worker.link for worker in self.workers]
        self._of = {worker.link.channel.fileno(): worker for worker in self.workers}
        self._poll = select.poll()
        for descriptor in self._of:
            self._poll.register(descriptor, select.POLLIN)

    def covers(self, workers: Iterable[WorkerHandle]) -> bool:
        """Whether it polls exactly these workers."""
        found = list(workers)
        return found == self.workers and all(map(is_, self._links, map(_LINK, found)))

    def wait(self) -> list[WorkerHandle]:
        """Return the workers that have sent something; none after a timeout."""
        return [self._of[descriptor] for descriptor, _ in self._poll.poll(_SLICE)]


def select_failures(replies: dict[WorkerHandle, Any], is_failure: Callable[[Any], bool]) -> dict[WorkerHandle, Any]:
    """Return the replies that are failures: after one, all other workers have undone the step."""
    return {worker: reply for worker, reply in replies.items() if is_failure(reply)}
