"""Host addresses: the name of a worker on another host in a device mapping.

node2/cpu         a worker on node2, on its CPU
10.0.0.2/cuda:1   on a GPU of 10.0.0.2
[fd00::2]/cpu     by IPv6 address
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ANY_HOST = "any"  # the cluster chooses the host
_HOST = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
_WORKER = re.compile(_HOST + r"/(?P<device>[a-z][a-z_]*(?::\d+)?)")
_TENSORFLOW = re.compile(r"(/job:\w+(/replica:0)?/task:\d+)?/(device:)?[A-Za-z][A-Za-z_]*:\d+")


@dataclass(frozen=True)
class Address:
    """The host of a worker, and the device it computes on."""

    host: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"[{self.host}]/{self.device}" if ":" in self.host else f"{self.host}/{self.device}"


def is_address(name: str) -> bool:
    """Whether an entry of a device mapping names a host."""
    return "/" in name and not is_tensorflow_device(name)


def is_tensorflow_device(name: str) -> bool:
    """Whether an entry of a device mapping is a full device name of TensorFlow, as in /job:worker/task:1/cpu:0."""
    return _TENSORFLOW.fullmatch(name) is not None


def worker_at(name: str) -> Address | None:
    """An entry of a device mapping that names a host; None if it is not well formed."""
    found = _WORKER.fullmatch(name)
    return None if found is None else Address(found["host"].strip("[]"), found["device"])
