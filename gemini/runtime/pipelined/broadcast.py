"""Asking all workers at once, and hearing whoever answers first.

A worker may wait for another that has failed, so nobody is waited for alone. Where one fails, or the program is
interrupted, the others are told to abandon the step; when all have answered, everything is as before.
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
_SLICE = 2000  # milliseconds between looks at the clock


class Broadcast:
    """Some workers of a pool, asked together."""

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
        """The replies of all. After the first failure the workers get what `abandon` makes of a number.

        Then everybody has undone what was asked, and only failures are told; None for the others.
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
            if has_pending_signal():  # as long as an operator may let a signal wait
                leave = leave or time.monotonic() + GRACE
            if (has_failed or (leave and time.monotonic() > leave)) and not abandoned:
                abandoned = True
                for worker in requests:
                    request = abandon(worker.next_number())
                    worker.link.send(request)
                    expected[worker, request.number] = "abandon"
                deadline = time.monotonic() + max(timeout, *(worker.timeout for worker in requests))
            received = self._receive(poller, deadline)
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
        """Send all; whether one could not be sent, which is then its reply. Nobody begins before all are ready."""
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
                    worker.link.send(request)
                expected[worker, request.number] = "step"
            except ChannelClosed:
                raise
            except Exception as error:
                replies[worker] = InternalFault(f"a step cannot be asked for: {type(error).__name__}: {error}")
                return True
        return False

    def _receive(self, poller: _Poller, deadline: float) -> list[tuple[WorkerHandle, Any]]:
        received = []
        for worker in poller.wait():
            found = worker.link.receive(0)
            while found is not None:
                if isinstance(found[0], UNSOLICITED):
                    worker.handle_unsolicited(found[0])
                else:
                    received.append((worker, found[0]))
                # What has not been read at all is seen when somebody waits again.
                found = worker.link.receive(0) if worker.link.channel.has_more else None
        if not received:
            self._check_alive(poller.workers, deadline)
        return received

    def _check_alive(self, workers: Sequence[WorkerHandle], deadline: float) -> None:
        """Nothing was received: is everybody there, and is there still time?"""
        for worker in workers:
            if worker.loss or worker.process.poll() is not None:
                raise worker.report_death()
        if time.monotonic() > deadline:
            raise workers[0].report_hang(workers[0].timeout)

    def _find_dead(self) -> WorkerError:
        """Whose end has closed a connection; it may take a moment until the process is seen to have ended."""
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            for worker in self.workers:
                if worker.loss or worker.process.poll() is not None:
                    return worker.report_death()
            time.sleep(0.01)
        return self.workers[0].report_death()


class _Poller:
    """Wait for whoever says something."""

    def __init__(self, workers: Iterable[WorkerHandle]) -> None:
        self.workers = list(workers)
        self._links = [worker.link for worker in self.workers]
        self._of = {worker.link.channel.fileno(): worker for worker in self.workers}
        self._poll = select.poll()
        for descriptor in self._of:
            self._poll.register(descriptor, select.POLLIN)

    def covers(self, workers: Iterable[WorkerHandle]) -> bool:
        """Whether it is these whom it hears."""
        found = list(workers)
        return found == self.workers and all(map(is_, self._links, map(_LINK, found)))

    def wait(self) -> list[WorkerHandle]:
        """Those who have said something; none after a while."""
        return [self._of[descriptor] for descriptor, _ in self._poll.poll(_SLICE)]


def select_failures(replies: dict[WorkerHandle, Any], is_failure: Callable[[Any], bool]) -> dict[WorkerHandle, Any]:
    """The replies that are failures: after one, what others have done is undone, whatever they said."""
    return {worker: reply for worker, reply in replies.items() if is_failure(reply)}
