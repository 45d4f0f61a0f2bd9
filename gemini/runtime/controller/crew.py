"""The crew: all workers of a managed model, started together, ended together.

However the program ends, nothing is left: at a normal end the crew is stopped; if the controller is killed the kernel
ends the workers. Processes that the program forks (data loaders) close their copies of the connections.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from gemini.errors import WorkerError
from gemini.runtime.controller.worker import Worker
from gemini.runtime.memory.homes import Home
from gemini.runtime.protocol import Done, Place, Raised
from gemini.runtime.transport.slabs import Segment

_PATIENCE = 60.0  # seconds


class Crew:
    """Workers, by place."""

    def __init__(self, count: int, threads: int, patience: float = _PATIENCE) -> None:
        self.owner = os.getpid()
        self.workers: list[Worker] = []
        self.number = 0
        self.placed = 0  # tensors that have a home
        try:
            for place in range(count):
                self.workers.append(Worker(place, threads, patience))
            for worker in self.workers:
                worker.greet()
        except BaseException:
            self.stop()
            raise
        _ALL.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the crew, rather than was forked from the one that did."""
        return os.getpid() == self.owner

    @property
    def is_torn(self) -> bool:
        """Whether an interrupt has cut a message in two, so that a worker cannot be asked any more."""
        return any(worker.link.channel.torn for worker in self.workers)

    def next_unit(self) -> int:
        """A number for a unit, which no other model's unit has."""
        self.number += 1
        return self.number

    def place(self, segment: Segment, homes: list[Home]) -> None:
        """Let every worker map the model's tensors."""
        for worker in self.workers:
            request = Place(worker.next_number(), segment.size, homes)
            _done(worker, worker.ask(request, "map the model's tensors", (segment.descriptor,)))
        self.placed += len(homes)

    def stop(self) -> None:
        """End all workers."""
        if self.is_ours:
            for worker in self.workers:
                worker.stop()
        self.workers = []


def _done(worker: Worker, reply: Any) -> None:
    if isinstance(reply, Raised):
        raise WorkerError(f"worker {worker.place}: {reply.name}: {reply.text}\n{reply.traceback}")
    if not isinstance(reply, Done):
        raise WorkerError(f"worker {worker.place}: {reply}")


_ALL: weakref.WeakSet[Crew] = weakref.WeakSet()


def _stop_all() -> None:
    for crew in list(_ALL):
        crew.stop()


def _forget_in_child() -> None:
    """A forked process must not keep the connections open, or a worker would not notice its controller's end."""
    for crew in list(_ALL):
        for worker in crew.workers:
            worker.link.close()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_in_child)
