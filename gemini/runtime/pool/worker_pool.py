"""The pool: all workers of a process, started together, ended together.

However the program ends, nothing is left: at a normal end the pool is stopped; when the last model that uses it is gone
its workers are ended; if the controller is killed the kernel ends them. Processes that the program forks (data
loaders) close their copies of the connections.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from gemini.config.host_address import is_address
from gemini.guards.globals_and_closures import remember_environment
from gemini.runtime.devices.base import Segment
from gemini.runtime.pool.remote_worker import RemoteWorker
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import Done, Forget, MapTensors, Preload
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.tensor_layout import TensorLayout

_TIMEOUT = 60.0  # seconds
_FAREWELL = 2.0  # seconds in which workers may leave by themselves


class WorkerPool:
    """Workers, by place."""

    def __init__(
        self,
        count: int,
        threads: int,
        timeout: float = _TIMEOUT,
        devices: Sequence[str] | None = None,
        home: str = "cpu",
    ) -> None:
        self.owner, self._process = os.getpid(), _process[0]
        self.workers: list[WorkerHandle] = []
        self.number = 0
        self.placed = 0  # tensors that have a home
        self._forgotten: deque[tuple[list[int], list[int], list[Segment]]] = deque()
        weakref.finalize(self, _end, self.workers, self.owner).atexit = False
        if not _ALL:
            remember_environment()
        try:
            for place, device in enumerate(devices or ["cpu"] * count):
                if is_address(device):
                    RemoteWorker(place, timeout, self.workers, device, home)
                else:
                    WorkerHandle(place, threads, timeout, self.workers, device)
            for worker in self.workers:
                worker.await_ready()
        except BaseException:
            _end(self.workers, self.owner)
            raise
        _ALL.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the pool, rather than was forked from the one that did."""
        return self._process is _process[0]

    @property
    def loss(self) -> str:
        """Why the pool cannot be asked any more; '' while it can."""
        if not self.workers:
            return "the workers have been stopped"
        for worker in self.workers:
            if worker.loss:
                return worker.loss
        return ""

    def next_module_number(self) -> int:
        """A number for a unit, which no other model's unit has."""
        self.number += 1
        return self.number

    def preload(self, names: list[str]) -> None:
        """Let workers import what a model will need, all at the same time."""
        for worker in self.workers:
            with contextlib.suppress(ChannelClosed):
                worker.link.send(Preload(names))

    def place(self, segment: Segment, homes: list[TensorLayout], device: str) -> int:
        """Let the workers of a device open tensors of the model; the number of the first."""
        self.flush_forgotten()
        shared, descriptors = segment.shared()
        first = self.placed
        self.placed += len(homes)
        for worker in self.workers:
            if worker.device.name == device:
                request = MapTensors(worker.next_number(), segment.size, shared, first, homes)
                _done(worker, worker.ask(request, "open the model's tensors", descriptors))
        segment.was_shared()
        return first

    def forget(self, units: list[int], homes: list[int], segments: list[Segment]) -> None:
        """A model is gone; workers are told with the next model, and until then its memory must stay.

        May run in any thread, at any time.
        """
        for worker in self.workers:
            worker.forget(units)
        self._forgotten.append((units, homes, segments))

    def flush_forgotten(self) -> None:
        """Let workers forget models that are gone."""
        while self._forgotten:
            units, homes, _ = self._forgotten.popleft()
            for worker in self.workers:
                worker.ask(Forget(worker.next_number(), units, homes), "forget a model")

    def stop(self) -> None:
        """End all workers."""
        if self.is_ours:
            for worker in self.workers:
                worker.request_stop()
            deadline = time.monotonic() + _FAREWELL
            for worker in self.workers:
                worker.await_exit(deadline)
        self.workers = []


def _end(workers: list[WorkerHandle], owner: int) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.kill()


def _done(worker: WorkerHandle, reply: Any) -> None:
    if not isinstance(reply, Done):
        raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.500}")


_ALL: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_process = [object()]  # stands for this process: to ask the system takes longer, and every call asks


def _is_another_process() -> None:
    _process[0] = object()


os.register_at_fork(after_in_child=_is_another_process)


def _stop_all() -> None:
    for pool in list(_ALL):
        pool.stop()


atexit.register(_stop_all)
