"""Host cluster: the other hosts of a pool of workers, and where their workers meet the controller.

RayCluster     hosts of a Ray cluster (`gemini.runtime.hosts.ray_cluster`)
NodeCluster    the processes of torchrun, mpirun or srun (`gemini.runtime.hosts.node_cluster`)
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from gemini.config.gemini_config import GeminiConfig
from gemini.config.host_address import is_address
from gemini.errors import ConfigError, Fault
from gemini.runtime.hosts.host_agent import HostAgent
from gemini.runtime.transport.gloo_pair import MeetingPoint

NODES = "nodes"  # in `GeminiConfig.cluster`: the nodes of the launcher that started this program


class HostCluster(Protocol):
    """The hosts of one pool."""

    host: str  # the address of this host, as other hosts reach it
    hosts: list[str]  # the addresses of all hosts

    def place(self, names: list[str], shards: int) -> list[str]:
        """Choose the hosts of the workers, with the shards of a stage together where a host has room for them.

        An entry that is on this host becomes a local device.
        """

    def supervise(self, index: int, name: str) -> tuple[HostAgent, dict[str, Any]]:
        """Return the agent of a worker, by its place among the names, and what it says about its host."""

    def meeting(self) -> MeetingPoint:
        """Return a new point where two processes meet."""

    def join(self, meeting: MeetingPoint) -> Any:
        """Return the store of such a point, for this process."""

    def close(self) -> None:
        """End the connection, and all agents."""


def find_address(config: GeminiConfig) -> str:
    """Return the address of the cluster of a configuration; raise ConfigError if there is none."""
    if config.cluster not in (None, "auto"):
        return str(config.cluster)
    found = os.environ.get("RAY_ADDRESS", "")
    if not found:
        asked = (
            "cluster = 'auto'" if config.cluster else "device_mapping names workers on other hosts without a cluster"
        )
        raise ConfigError([Fault(f"{asked}, and RAY_ADDRESS is not set", "give --cluster HOST:PORT, or cluster=")])
    return found


def check_cluster(config: GeminiConfig) -> None:
    """Raise ConfigError where the cluster of a configuration cannot be joined, as far as that shows quickly."""
    if not needs_cluster(config) or config.cluster == NODES:
        return
    from gemini.runtime.hosts.ray_cluster import check_reachable

    check_reachable(find_address(config))


def needs_cluster(config: GeminiConfig) -> bool:
    """Whether a configuration has workers on other hosts."""
    mapped = (name for devices in (config.device_mapping or {}).values() for name in devices.values())
    return config.cluster is not None or any(map(is_address, mapped))


def open_cluster(config: GeminiConfig) -> HostCluster:
    """Return the cluster of a configuration; raise ConfigError if there is none, or it cannot be joined."""
    address = find_address(config)
    if _opened:
        return _opened.pop()
    if address == NODES:
        from gemini.runtime.hosts.node_cluster import NodeCluster

        return NodeCluster()
    from gemini.runtime.hosts.ray_cluster import RayCluster

    return RayCluster(address)


def count_hosts(config: GeminiConfig) -> int:
    """Return the number of hosts of the cluster; the next pool uses the connection."""
    if not _opened:
        _opened.append(open_cluster(config))
    return len(_opened[0].hosts)


_opened: list[HostCluster] = []
