"""A cluster for tests whose other host is this one, at the loopback address.

Supervisors, workers, frames and tensors are those of any cluster; only what carries the requests to supervisors is a
call of this process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gemini.config.host_address import worker_at
from gemini.errors import WorkerError
from gemini.runtime.hosts.host_agent import HostAgent
from gemini.runtime.hosts.host_supervisor import HostSupervisor
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.transport.gloo_pair import MeetingPoint

HOST = "127.0.0.1"
CPU = f"{HOST}/cpu"  # as in a device mapping
ROOT = Path(__file__).parents[3]


class LoopbackAgent:
    """Calls a supervisor; `is_cut`: nothing answers any more."""

    host = HOST

    def __init__(self) -> None:
        self.supervisor = HostSupervisor(HOST, lambda: None)
        self.is_cut = False

    def call(self, method: str, seconds: float, **given: Any) -> dict[str, Any]:
        if self.is_cut:
            raise WorkerError("no answer")
        return self.supervisor.answer(method, **given)

    def release(self) -> None:
        self.supervisor.end()


class LoopbackCluster:
    host = HOST

    def __init__(self) -> None:
        self.hosts = [HOST]
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.agents: list[LoopbackAgent] = []
        self._numbers = itertools.count()

    def place(self, names: list[str]) -> list[str]:
        return names

    def supervise(self, index: int, name: str) -> tuple[HostAgent, dict[str, Any]]:
        assert worker_at(name) is not None
        self.agents.append(LoopbackAgent())
        return self.agents[-1], self.agents[-1].call("describe", 1.0) | {"cores": 1}

    def meeting(self) -> MeetingPoint:
        return MeetingPoint(HOST, self.store.port, f"{os.getpid()}/{next(self._numbers)}")

    def join(self, meeting: MeetingPoint) -> Any:
        return meeting.join(60.0)

    def close(self) -> None:
        for agent in self.agents:
            agent.release()


def loopback_pool(devices: list[str], timeout: float = 30.0) -> WorkerPool:
    """Workers, some of them on "another host"."""
    return WorkerPool(len(devices), 1, timeout, devices, cluster=LoopbackCluster())


def children(pid: int) -> list[int]:
    """Living processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(folder.name)] if parent == pid else []
    return found
