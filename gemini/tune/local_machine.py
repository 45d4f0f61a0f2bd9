"""Local machine: this host as a cluster of worker processes.

Computation is measured (`machine_capture`), so the rates of the device class are not used; its memory is this
machine's, divided between the workers, which take turns on its processors where they are more.
"""

from __future__ import annotations

import os
from dataclasses import replace

from gemini.cluster.cluster_description import Cluster, HostGroup
from gemini.cluster.cluster_file import find_device_class
from gemini.cluster.link_tier import LinkTier
from gemini.tensor_parallel.shard_costs import ShardCosts

_SHARE = 0.9  # of the memory of the machine


def local_cluster(devices: int, memory_limit: float | None = None) -> Cluster:
    """Return this machine with that many workers; `memory_limit`: bytes of one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE / devices
    base = find_device_class("cpu")
    device = replace(base, memory_gib=(memory_limit or memory) / 2**30, overlap_loss=0.0)
    costs = ShardCosts()
    # An exchange of two takes two hops of a ring.
    tier = LinkTier("shared memory", costs.link_gb, latency_us=costs.latency_us / 2, efficiency=1.0)
    group = HostGroup(device, 1, devices, len(os.sched_getaffinity(0)))
    return Cluster("this machine", (group,), (tier,))
