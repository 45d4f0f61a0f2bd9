"""Reply mailbox: matches the replies of a worker with the threads that wait for them.

Several threads may have requests under way with one worker. One of them at a time reads from the link; a reply to
another thread's request goes into the mailbox, and the waiting threads are notified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ReplyMailbox:
    """Replies of one worker by request number, and the right to read from its link."""

    def __init__(self) -> None:
        self.replies: dict[int, Any] = {}
        self.has_reader = False
        self.waiting = 0  # threads
        self._arrival = threading.Condition(threading.Lock())

    def wait_for(self, number: int, receive: Callable[[], Any]) -> Any:
        """Return the reply to a request; `receive` returns the next reply of the worker, whichever that is."""
        with self._arrival:
            self._await_turn(number)
            if number in self.replies:
                return self.replies.pop(number)
            self.has_reader = True
        try:
            while True:
                reply = receive()
                if reply.number == number:
                    return reply
                self.put(reply)
        finally:
            self.release_reader()

    def acquire_reader(self) -> None:
        """Wait until no other thread reads, and take the right to."""
        with self._arrival:
            self._await_turn()
            self.has_reader = True

    def release_reader(self) -> None:
        """Let another thread read."""
        with self._arrival:
            self.has_reader = False
            if self.waiting:
                self._arrival.notify_all()

    def put(self, reply: Any) -> None:
        """Store a reply that another thread waits for."""
        with self._arrival:
            self.replies[reply.number] = reply
            self._arrival.notify_all()

    def _await_turn(self, number: int = -1) -> None:
        while self.has_reader and number not in self.replies:
            self.waiting += 1
            try:
                self._arrival.wait()
            finally:
                self.waiting -= 1
