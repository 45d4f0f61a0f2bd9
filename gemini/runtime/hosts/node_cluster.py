"""Node cluster: the nodes of torchrun, mpirun or srun, whose agents start the workers of this program.

Rank 0 runs the script; the agents of the other ranks answer at a store (`gemini.runtime.hosts.node_agent`). Every node
has the workers of one replica.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from typing import Any, NamedTuple

from gemini.config.host_address import worker_at
from gemini.errors import ConfigError, Fault, WorkerError
from gemini.runtime.hosts.host_agent import HostAgent
from gemini.runtime.hosts.node_agent import NODES, PREFIX
from gemini.runtime.hosts.own_address import address_towards
from gemini.runtime.transport.gloo_pair import MeetingPoint

_JOINING = 120.0  # seconds for a node to join
_DESCRIBING = 30.0
_SLICE = 0.01
_numbers = itertools.count(1)  # of meetings, unique in the process


class Nodes(NamedTuple):
    """The meeting point of the nodes, and their number."""

    host: str
    port: int
    number: int


@functools.cache
def launched_nodes() -> Nodes | None:
    """Return the nodes at the disposal of this program, and remove the variable: its children have none."""
    text = os.environ.pop(NODES, "")
    given = json.loads(text) if text else None
    return None if given is None else Nodes(given["host"], given["port"], given["count"])


class NodeCluster:
    """The nodes of this program."""

    def __init__(self) -> None:
        nodes = launched_nodes()
        if nodes is None:
            fault = "cluster = 'nodes', and no launcher has started this program on several nodes"
            raise ConfigError([Fault(fault, "torchrun --nnodes 2 --nproc-per-node 1 $(which gemini_python) train.py")])
        self._nodes, self._local = nodes, threading.local()
        self.hosts = [f"node{rank}" for rank in range(nodes.number)]
        self._requests = _next_requests(nodes.number)
        self._sending = threading.Lock()
        self.host = address_towards(self._await_node(1))

    @property
    def _store(self) -> Any:
        """The store, by a connection of this thread: a wait blocks the connection."""
        if not hasattr(self._local, "store"):
            self._local.store = MeetingPoint(self._nodes.host, self._nodes.port, PREFIX).join(_JOINING)
        return self._local.store

    def _await_node(self, rank: int) -> str:
        """Return the address of a node, once its agent is there."""
        try:
            return str(self._store.get(f"agent/{rank}").decode())
        except RuntimeError:
            what = f"node {rank} has not joined within {_JOINING:.0f} s"
            raise ConfigError([Fault(what, "see its output; start as many processes as there are nodes")]) from None

    def place(self, names: list[str], shards: int) -> list[str]:  # noqa: ARG002 - replicas have no shards
        """Give every node the same number of workers, rank 0 first."""
        each, rest = divmod(len(names), self._nodes.number)
        if rest:
            what = f"{len(names)} workers on {self._nodes.number} nodes"
            raise ConfigError([Fault(what, "request a multiple of the number of nodes, or leave workers out")])
        placed = []
        for at, name in enumerate(names):
            address = worker_at(name)
            assert address is not None
            kind = address.device.partition(":")[0]
            device = kind if kind == "cpu" else f"{kind}:{at % each}"
            placed.append(device if at < each else f"node{at // each}/{device}")
        return placed

    def supervise(self, index: int, name: str) -> tuple[HostAgent, dict[str, Any]]:
        """Return the agent of a worker."""
        address = worker_at(name)
        assert address is not None
        rank = int(address.host.removeprefix("node"))
        self._await_node(rank)
        agent = _StoreAgent(self, rank, f"{next(_numbers)}/{index}", address.host)
        return agent, agent.call("describe", _DESCRIBING)

    def meeting(self) -> MeetingPoint:
        """Return a new prefix of the store."""
        return MeetingPoint(self._nodes.host, self._nodes.port, f"{PREFIX}/{os.getpid()}/{next(_numbers)}")

    def join(self, meeting: MeetingPoint) -> Any:
        """Return that part of the store, by a connection of its own."""
        return meeting.join(_JOINING)

    def send(self, rank: int, request: dict[str, Any]) -> int:
        """Send a request to an agent; return its number."""
        with self._sending:  # agents take requests in their order
            number: int = next(self._requests[rank])
            self._store.set(f"request/{rank}/{number}", json.dumps(request))
        return number

    def receive(self, rank: int, number: int, seconds: float) -> dict[str, Any]:
        """Return the reply to a request."""
        key = f"reply/{rank}/{number}"
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RuntimeError("no reply")
            time.sleep(_SLICE)
        found: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return found

    def close(self) -> None:
        """Do nothing: the agents serve the script to its end, and their workers have been released."""


@functools.cache
def _next_requests(count: int) -> list[Any]:
    """Return the numbers of requests, by rank: they go on from one pool to the next."""
    return [itertools.count() for _ in range(count)]


class _StoreAgent:
    """Carries requests to the supervisor of one worker."""

    def __init__(self, cluster: NodeCluster, rank: int, worker: str, host: str) -> None:
        self.host, self._cluster, self._rank, self._worker = host, cluster, rank, worker

    def call(self, method: str, seconds: float, **given: Any) -> dict[str, Any]:
        """Return the supervisor's answer."""
        began = time.monotonic()
        request = {"worker": self._worker, "method": method, "given": given, "replies": True}
        try:
            found = self._cluster.receive(self._rank, self._cluster.send(self._rank, request), seconds)
        except RuntimeError:
            late = f"node {self._rank} has not answered for {time.monotonic() - began:.0f} s"
            raise WorkerError(late) from None
        if "error" in found:
            raise WorkerError(f"node {self._rank}: {found['error']}")
        answer: dict[str, Any] = found["answer"]
        return answer

    def release(self) -> None:
        """End the supervisor's process."""
        request = {"worker": self._worker, "method": "kill", "given": {}, "replies": False}
        try:
            self._cluster.send(self._rank, request)
        except RuntimeError:
            return  # the store is gone: the agents end
