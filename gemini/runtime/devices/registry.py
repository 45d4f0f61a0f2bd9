"""Device registry: the class behind the name of a device.

`cpu` and `cuda` are built in. Packages add back ends under the entry-point group `gemini.devices`, a script adds one
with `register`. Classes are named by path, `package.module:Class`, since workers import them too.
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
    """Register devices `kind:0`, `kind:1`, …; their class is at `path`, `package.module:Class`."""
    _known[kind] = path


@functools.lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    return {found.name: found.value for found in entry_points(group=GROUP)}


def is_registered(name: str) -> bool:
    """Return whether a class for devices of this name is registered."""
    return name.partition(":")[0] in {**_installed(), **_known}


def class_path(name: str) -> str:
    """Return the path of the class of a device."""
    kind = name.partition(":")[0]
    paths = {**_installed(), **_known}
    if kind not in paths:
        known = ", ".join(sorted(paths))
        raise ConfigError(
            [Fault(f"device {name!r} is of no known kind", f"use one of {known}, or register a back end")]
        )
    return paths[kind]


def create_device(name: str, path: str = "") -> Device:
    """Return the device of this name, from the class at `path` or else the registered one."""
    module, _, attribute = (path or class_path(name)).partition(":")
    made: Device = getattr(importlib.import_module(module), attribute)(int(name.partition(":")[2] or 0))
    return made


def check_devices(names: list[str]) -> None:
    """Raise a ConfigError that lists every device that cannot be used on this machine."""
    reasons = {name: create_device(name).obstacle() for name in dict.fromkeys(names)}
    faults = [Fault(f"device {name!r}: {reason}", "map workers to devices of this machine")
              for name, reason in reasons.items() if reason]  # fmt: skip
    if faults:
        raise ConfigError(faults)
