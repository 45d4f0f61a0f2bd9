"""Local machine: this host as a cluster, from its processors, its memory and the measured link of two processes.

Computation of a captured model is measured (`gemini profile`), so the rates of the device class are not used for it.
What they do set is the time of the optimizer, and the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cache_files import cache_folder
from gemini.cluster.cluster_description import Cluster, HostGroup
from gemini.cluster.cluster_file import find_device_class
from gemini.cluster.link_tier import LinkTier
from gemini.errors import GeminiError
from gemini.tune.captured_costs import CapturedCosts, Segment

if TYPE_CHECKING:
    from gemini.profiling.link_profile import LinkProfile

_SHARE = 0.9  # of the memory of the machine


def local_cluster(devices: int, link: LinkProfile | None = None) -> Cluster:
    """Return this machine with that many workers; memory is divided between them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE / 2**30
    base = find_device_class("cpu")
    device = replace(base, memory_gib=memory / devices, overlap_loss=0.0)
    latency, bandwidth = (link.latency_ms * 1e3, link.bandwidth * 1e3 / 1e9) if link else (100.0, 4.0)
    tier = LinkTier("shared memory", max(bandwidth, 1e-3), latency_us=latency, efficiency=1.0)
    return Cluster("this machine", (HostGroup(device, 1, devices),), (tier,))


def measured_link() -> LinkProfile | None:
    """Return the link between two processes here, measured once per machine; None where it cannot be measured."""
    from gemini.profiling.link_profile import LinkProfile, profile_link

    folder = cache_folder("links")
    path = None if folder is None else folder / f"{os.uname().nodename}.json"
    if path is not None:
        with contextlib.suppress(GeminiError):
            return LinkProfile.load(path)
    try:
        found = profile_link()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        return found
    except GeminiError:
        return None


def save_costs(costs: CapturedCosts, path: Path) -> None:
    """Write captured costs as JSON, for the process that tunes."""
    path.write_text(json.dumps(asdict(costs)), encoding="utf-8")


def load_costs(path: Path) -> CapturedCosts:
    """Read a file written by `save_costs`."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    chain = tuple(Segment(**part) for part in data.pop("chain"))
    first, last = Segment(**data.pop("first")), Segment(**data.pop("last"))
    return CapturedCosts(first=first, chain=chain, last=last, **data)
