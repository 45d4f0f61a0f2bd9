"""Peer mesh: connects the workers of a pool that exchange values; each connection is made once, when a plan first
needs one, and retained.

Two workers of this host get the ends of a socket and share memory. A worker on another host meets its peers through
torch.distributed.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable

from gemini.runtime.pipelined.broadcast import Broadcast
from gemini.runtime.pool.worker_handle import START_TIMEOUT, InternalFault, WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Done, Forget
from gemini.runtime.step_messages import Connect, ConnectHosts
from gemini.runtime.transport.channel import Channel

_connected: weakref.WeakKeyDictionary[WorkerPool, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


def connect(pool: WorkerPool, pairs: Iterable[tuple[int, int]]) -> None:
    """Connect pairs of workers, with devices of one kind."""
    known = _connected.setdefault(pool, set())
    for pair in sorted(set(pairs) - known):
        workers = [pool.workers[place] for place in pair]
        if len({worker.device.kind for worker in workers}) > 1:
            raise InternalFault(f"workers {pair[0]} and {pair[1]} have devices of several kinds: one is needed")
        if any(worker.is_remote for worker in workers):
            _connect_hosts(pool, pair, workers)
        else:
            _connect_here(pair, workers)
        known.add(pair)


def _connect_here(pair: tuple[int, int], workers: list[WorkerHandle]) -> None:
    if len({worker.device.name for worker in workers}) > 1:
        raise InternalFault(f"workers {pair[0]} and {pair[1]} share no memory: one device is needed")
    ends = Channel.pair()
    try:
        for side, (worker, end) in enumerate(zip(workers, ends, strict=True)):
            request = Connect(worker.next_number(), pair[1 - side], side)
            _check(worker, worker.ask(request, "connect to another worker", (end.fileno(),)))
    finally:
        for end in ends:
            end.close()


def _connect_hosts(pool: WorkerPool, pair: tuple[int, int], workers: list[WorkerHandle]) -> None:
    """Make both ends meet: each waits for the other, so both are asked at once."""
    assert pool.cluster is not None
    (host, port, prefix), key = pool.cluster.meeting(), secrets.token_bytes(32)
    requests = {
        worker: ConnectHosts(
            worker.next_number(), pair[1 - side], side, worker.host or pool.cluster.host,
            (host, port, prefix), key,
            max(worker.timeout, START_TIMEOUT),
        )
        for side, worker in enumerate(workers)
    }  # fmt: skip
    replies = Broadcast(workers).ask(
        requests, "connect to a worker on another host", lambda reply: not isinstance(reply, Done),
        lambda number: Forget(number, [], []), START_TIMEOUT,
    )  # fmt: skip
    for worker, reply in replies.items():
        _check(worker, reply)


def _check(worker: WorkerHandle, reply: object) -> None:
    if not isinstance(reply, Done):
        raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.300}")
