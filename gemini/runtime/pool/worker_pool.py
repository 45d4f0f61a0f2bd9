"""Worker pool: all workers of a controller, started and ended together.

No process is left behind however the script ends: at a normal exit the pool is stopped; when the last model that uses
it is gone its workers are ended; if the controller is killed the kernel ends them. Processes that the script forks
(data loaders) close their copies of the connections.
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
from gemini.runtime.devices.base import Segment
from gemini.runtime.hosts.host_cluster import HostCluster
from gemini.runtime.memory.shared_tensor import SharedTable
from gemini.runtime.pool.remote_worker import RemoteWorker
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.protocol import Done, Forget, MapTensors, Preload
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.tensor_layout import TensorLayout

_TIMEOUT = 60.0  # seconds
_EXIT_TIMEOUT = 2.0  # seconds in which workers may exit by themselves


class WorkerPool:
    """Worker handles, by index."""

    def __init__(
        self,
        count: int,
        threads: int,
        timeout: float = _TIMEOUT,
        devices: Sequence[str] | None = None,
        model_device: str = "cpu",
        *,
        in_background: bool = False,
        cluster: HostCluster | None = None,
    ) -> None:
        """Start the workers, those on other hosts by a cluster, whose end they decide.

        With `in_background`, return before they are up (`await_ready`).
        """
        self.owner, self._process = os.getpid(), _process[0]
        self.workers: list[WorkerHandle] = []
        self.number = 0
        self.placed = 0  # tensors in shared memory
        self.shared = SharedTable()
        self._forgotten: deque[tuple[list[int], list[int], list[Segment]]] = deque()
        self.cluster = cluster
        weakref.finalize(self, _end, self.workers, self.owner, cluster).atexit = False
        try:
            names = devices or ["cpu"] * count
            for index, device in enumerate(names):
                if cluster is not None and is_address(device):
                    RemoteWorker(index, timeout, self.workers, names, model_device, cluster)
                else:
                    WorkerHandle(index, threads, timeout, self.workers, device)
        except BaseException:
            _end(self.workers, self.owner, cluster)
            raise
        self._starting = [*self.workers]
        _ALL.add(self)
        if not in_background or any(worker.is_remote for worker in self.workers):
            self.await_ready()

    def await_ready(self) -> None:
        """Wait until all workers are up; ends them where one cannot start."""
        try:
            while self._starting:
                self._starting[0].await_ready()
                self._starting.pop(0)
        except BaseException:
            _end(self.workers, self.owner, self.cluster)
            raise

    @property
    def is_ready(self) -> bool:
        """Whether `await_ready` would return, or raise, at once."""
        return all(worker.has_reply for worker in self._starting)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the pool, rather than was forked from the one that did."""
        return self._process is _process[0]

    @property
    def loss(self) -> str:
        """Why the pool cannot be used any more; '' while it can."""
        if not self.workers:
            return "the workers have been stopped"
        for worker in self.workers:
            if worker.loss:
                return worker.loss
        return ""

    def next_module_number(self) -> int:
        """Return a number for a remote module, unique across models."""
        self.number += 1
        return self.number

    def preload(self, names: list[str]) -> None:
        """Make all workers import the modules that a model will need, in parallel."""
        for worker in self.workers:
            with contextlib.suppress(ChannelClosed):
                worker.link.send(Preload(names))

    def number_tensors(self, count: int) -> int:
        """Return the first of so many numbers for tensors, unique across the workers."""
        first, self.placed = self.placed, self.placed + count
        return first

    def map_tensors(self, segment: Segment, layouts: list[TensorLayout], device: str) -> int:
        """Map tensors of the model in the workers of a device; return the number of the first."""
        self.flush_forgotten()
        shared, descriptors = segment.shared()
        first = self.number_tensors(len(layouts))
        for worker in self.workers:
            if worker.device.name == device:
                request = MapTensors(worker.next_number(), segment.size, shared, first, layouts)
                _check_done(worker, worker.ask(request, "open the model's tensors", descriptors))
        segment.was_shared()
        return first

    def forget_model(self, modules: list[int], tensors: list[int], segments: list[Segment]) -> None:
        """Note that modules and tensors are gone. Workers are informed with the next; the segments stay until then.

        May run in any thread, at any time.
        """
        for worker in self.workers:
            worker.forget_modules(modules)
        self._forgotten.append((modules, tensors, segments))

    def flush_forgotten(self) -> None:
        """Make the workers forget what is gone."""
        gone = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        modules = [number for numbers, _, _ in gone for number in numbers]
        tensors = [number for _, numbers, _ in gone for number in numbers]
        for worker in self.workers if modules or tensors else ():
            worker.ask(Forget(worker.next_number(), modules, tensors), "forget a model")

    def stop(self) -> None:
        """End all workers."""
        if self.is_ours:
            for worker in self.workers:
                worker.request_stop()
            deadline = time.monotonic() + _EXIT_TIMEOUT
            for worker in self.workers:
                worker.await_exit(deadline)
            if self.cluster is not None:
                self.cluster.close()
        self.workers = []


def _end(workers: list[WorkerHandle], owner: int, cluster: HostCluster | None) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.kill()
        if cluster is not None:
            cluster.close()


def _check_done(worker: WorkerHandle, reply: Any) -> None:
    if not isinstance(reply, Done):
        raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.500}")


_ALL: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_process = [object()]  # identifies this process; os.getpid() is slower, and every call checks


def _note_fork() -> None:
    _process[0] = object()


os.register_at_fork(after_in_child=_note_fork)


def _stop_all() -> None:
    for pool in list(_ALL):
        pool.stop()


atexit.register(_stop_all)
