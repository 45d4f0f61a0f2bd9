"""Peer mesh: which workers of a pool have a direct connection. Created where a plan needs one, and retained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from gemini.runtime.pool.worker_handle import InternalFault
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Done
from gemini.runtime.step_messages import Connect
from gemini.runtime.transport.channel import Channel

_connected: weakref.WeakKeyDictionary[WorkerPool, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


def connect(pool: WorkerPool, pairs: Iterable[tuple[int, int]]) -> None:
    """Connect pairs of workers; both must be on this host, with devices of one kind."""
    known = _connected.setdefault(pool, set())
    for pair in sorted(set(pairs) - known):
        workers = [pool.workers[place] for place in pair]
        kinds = {worker.device.name for worker in workers}
        if any(getattr(worker, "is_remote", False) for worker in workers) or len(kinds) > 1:
            raise InternalFault(
                f"workers {pair[0]} and {pair[1]} share no memory: one host and one device kind is needed"
            )
        ends = Channel.pair()
        try:
            for side, (worker, end) in enumerate(zip(workers, ends, strict=True)):
                request = Connect(worker.next_number(), pair[1 - side], side)
                reply = worker.ask(request, "connect to another worker", (end.fileno(),))
                if not isinstance(reply, Done):
                    raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.300}")
        finally:
            for end in ends:
                end.close()
        known.add(pair)
