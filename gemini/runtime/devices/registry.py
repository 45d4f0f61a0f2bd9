"""The registry: which class is behind the name of a device.

Built in are `cpu` and `cuda`. Packages add others under the entry-point group `gemini.devices`; a program adds one with
`register`. Classes are named by where they are found, `package.module:Class`, since workers must find them too.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points

from gemini.errors import ConfigError, Fault
from gemini.runtime.devices.base import Device

GROUP = "gemini.devices"
_known = {"cpu": "gemini.runtime.devices.cpu:Cpu", "cuda": "gemini.runtime.devices.cuda:Cuda"}


def register(kind: str, path: str) -> None:
    """Make devices `kind:0`, `kind:1`, … known; their class is at `path`, `package.module:Class`."""
    _known[kind] = path


@functools.lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    return {found.name: found.value for found in entry_points(group=GROUP)}


def is_registered(name: str) -> bool:
    """Whether there is a class for devices of that name."""
    return name.partition(":")[0] in {**_installed(), **_known}


def class_path(name: str) -> str:
    """Where the class of a device is found."""
    kind = name.partition(":")[0]
    paths = {**_installed(), **_known}
    if kind not in paths:
        known = ", ".join(sorted(paths))
        raise ConfigError(
            [Fault(f"device {name!r} is of no known kind", f"use one of {known}, or register a back end")]
        )
    return paths[kind]


def create_device(name: str, path: str = "") -> Device:
    """The device of that name; from the class at `path`, which is looked up unless given."""
    module, _, attribute = (path or class_path(name)).partition(":")
    made: Device = getattr(importlib.import_module(module), attribute)(int(name.partition(":")[2] or 0))
    return made


def check_devices(names: list[str]) -> None:
    """Raise a ConfigError that lists every device that cannot be used here."""
    reasons = {name: create_device(name).obstacle() for name in dict.fromkeys(names)}
    faults = [Fault(f"device {name!r}: {reason}", "map workers to devices of this machine")
              for name, reason in reasons.items() if reason]  # fmt: skip
    if faults:
        raise ConfigError(faults)
