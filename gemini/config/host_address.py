"""Host addresses: the name of a worker on another host in a device mapping.

node2:9000/cpu      the worker that listens at port 9000 of node2, on its CPU
node2:9000/cuda:1   on its second GPU
[fd00::2]:9000/cpu  by IPv6 address
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HOST = r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
_PLACE = re.compile(_HOST + r":(?P<port>\d{1,5})")
_WORKER = re.compile(_HOST + r":(?P<port>\d{1,5})/(?P<device>[a-z][a-z_]*(?::\d+)?)")
_TENSORFLOW = re.compile(r"(/job:\w+(/replica:0)?/task:\d+)?/(device:)?[A-Za-z][A-Za-z_]*:\d+")


@dataclass(frozen=True)
class Address:
    """Host and port a worker listens on, and the device it computes on."""

    host: str
    port: int
    device: str = "cpu"

    @property
    def place(self) -> str:
        """As in `--listen`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.place}/{self.device}"


def is_address(name: str) -> bool:
    """Whether an entry of a device mapping names a host."""
    return "/" in name and not is_tensorflow_device(name)


def is_tensorflow_device(name: str) -> bool:
    """Whether an entry of a device mapping is a full device name of TensorFlow, as in /job:worker/task:1/cpu:0."""
    return _TENSORFLOW.fullmatch(name) is not None


def worker_at(name: str) -> Address | None:
    """An entry of a device mapping that names a host; None if it is not well formed."""
    found = _WORKER.fullmatch(name)
    return None if found is None else _make_address(found, found["device"])


def place_at(text: str) -> Address | None:
    """HOST:PORT, as in `--listen`; None if it is not well formed."""
    found = _PLACE.fullmatch(text)
    return None if found is None else _make_address(found, "cpu", least=0)


def _make_address(found: re.Match[str], device: str, least: int = 1) -> Address | None:
    port = int(found["port"])
    return Address(found["host"].strip("[]"), port, device) if least <= port < 1 << 16 else None
