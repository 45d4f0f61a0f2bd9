"""Devices in a script, and their replacement on machines without them.

A device of this machine stays, so that the script behaves as under `python`. An absent one becomes the *managed
device* (`cpu` by default), with one line per device on standard error. Values that are not devices (`None`, a dtype, a
tensor, a misspelt name) are returned unchanged, for PyTorch to raise its error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gemini.instrument.names.device_names import ACCELERATORS
from gemini.log import log_line

_NAME = re.compile(r"([a-z]+)(?::(\d+))?\Z")

_managed = "cpu"
_present: dict[tuple[str, int], bool] = {}
_replaced: set[str] = set()


def torch_module() -> ModuleType | None:
    """Return PyTorch if the script has imported it; not another module of that name."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "Tensor") else None


def set_managed_device(name: str) -> str:
    """Set the device that replaces absent ones; return the previous one."""
    global _managed
    before, _managed = _managed, name
    return before


def managed_device() -> str:
    """Return the device that replaces absent ones."""
    return _managed


def is_present(kind: str, index: int = 0) -> bool:
    """Return whether this machine has device `kind:index`; cached per device."""
    if kind not in ACCELERATORS:
        return True
    known = _present.get((kind, index))
    if known is None:
        known = _present[(kind, index)] = _query_torch(kind, index)
    return known


def is_replaced(kind: str) -> bool:
    """Return whether a device of this kind was replaced by the managed device."""
    return kind in _replaced


def device(value: Any) -> Any:
    """Return `value`, or the managed device as the same type if `value` is an absent device."""
    torch = torch_module()
    if value is None or torch is None:
        return value
    named = _parse_device(value, torch)
    if named is None or is_present(*named):
        return value
    _announce(*named)
    return torch.device(_managed) if isinstance(value, torch.device) else _managed


def device_type(value: Any) -> Any:
    """Return the device type of autocast and gradient scalers.

    PyTorch disables both, with a warning, where their device is absent; a script that runs so under `python` must not
    change. So the type is replaced only after a device of the script was.
    """
    if isinstance(value, str) and is_replaced(value) and not is_present(value):
        return _managed.split(":", maxsplit=1)[0]
    return value


def map_location(value: Any = None) -> Any:
    """Return the `map_location` of `torch.load`: absent devices in the argument and in the file are replaced."""
    if isinstance(value, dict):
        return {source: device(target) for source, target in value.items()}
    if value is None and torch_module() is not None:
        return _locate
    return device(value)


def pin_memory(value: Any) -> Any:
    """Return the `pin_memory` of a new tensor: False without an accelerator."""
    return value if not value or has_accelerator() else False


def device_ids(value: Any) -> Any:
    """Return the `device_ids` or `output_device` of DistributedDataParallel: None without CUDA."""
    return value if value is None or replacement_for("cuda") is None else None


def backend(value: Any) -> Any:
    """Return the backend of a process group: "gloo" in place of "nccl" where CUDA is absent."""
    return "gloo" if isinstance(value, str) and "nccl" in value and replacement_for("cuda") else value


def keywords(options: Any) -> Any:
    """Return the ``**options`` of a PyTorch call with absent devices replaced; the same object without any."""
    if not isinstance(options, dict):
        return options
    routed = {name: route(options[name]) for name, route in KEYWORDS.items() if name in options}
    return options if all(options[name] is value for name, value in routed.items()) else {**options, **routed}


def has_accelerator() -> bool:
    """Return whether PyTorch has an accelerator on this machine."""
    torch = torch_module()
    return torch is not None and (is_present("cuda") or is_present("xpu") or is_present("mps"))


# Keywords of PyTorch functions that name a device → the function that routes their values.
KEYWORDS: dict[str, Callable[[Any], Any]] = {
    "device": device,
    "device_type": device_type,
    "map_location": map_location,
    "pin_memory": pin_memory,
}


def replacement_for(kind: str, index: int = 0) -> str | None:
    """Return the managed device, announced once, if `kind:index` is absent, else None."""
    if torch_module() is None or is_present(kind, index):
        return None
    _announce(kind, index)
    return _managed


def _locate(storage: Any, location: str) -> Any:
    """Return None to restore a storage on its device, or the storage on the managed device if that is absent."""
    named = _parse(location)
    if named is None or is_present(*named):
        return None  # restored by PyTorch
    _announce(*named)
    return storage if _managed == "cpu" else storage.to(device=_managed)


def _parse_device(value: Any, torch: ModuleType) -> tuple[str, int] | None:
    if isinstance(value, str):
        return _parse(value)
    if isinstance(value, torch.device):
        return value.type, value.index or 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "cuda", value
    return None


def _parse(name: str) -> tuple[str, int] | None:
    match = _NAME.match(name)
    return (match[1], int(match[2] or 0)) if match else None


def _query_torch(kind: str, index: int) -> bool:
    torch = torch_module()
    module = getattr(torch, kind, None)
    available: Callable[[], bool] | None = getattr(module, "is_available", None)
    if available is None or not available():
        return False
    count: Callable[[], int] | None = getattr(module, "device_count", None)
    return count is None or 0 <= index < count()


_announced: set[tuple[str, int]] = set()


def _announce(kind: str, index: int) -> None:
    _replaced.add(kind)
    if (kind, index) not in _announced and not _is_quiet():
        _announced.add((kind, index))
        log_line(f"gemini: {kind}:{index} is not on this machine: using {_managed}")


def _is_quiet() -> bool:
    """Return whether `gemini_python --quiet` started this process."""
    module = sys.modules.get("gemini.launcher.process.launch_session")
    session = module.current() if module is not None else None
    return session is not None and bool(session["quiet"])
