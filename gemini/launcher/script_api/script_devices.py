"""Devices named in a script, and the device that takes their place where they do not exist.

The rule: a device that is on this machine stays what it is, so that the script does what `python` would do.
One that is not becomes the *managed device* (`cpu`, unless a run time chose another), and one line on
standard error says so, once a device. Values that name no device (`None`, a dtype, a tensor, a misspelt
name) pass through, and torch's own error stays torch's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gemini.instrument.names.device_names import ACCELERATORS
from gemini.log import tell

_NAME = re.compile(r"([a-z]+)(?::(\d+))?\Z")

_managed = "cpu"
_present: dict[tuple[str, int], bool] = {}
_replaced: set[str] = set()


def torch_module() -> ModuleType | None:
    """Torch, when the script has imported it; not some other module of that name."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "Tensor") else None


def set_managed_device(name: str) -> str:
    """Choose the device that stands in for absent ones; returns the one before. For run times, not scripts."""
    global _managed
    before, _managed = _managed, name
    return before


def managed_device() -> str:
    """The device that stands in for absent ones."""
    return _managed


def is_present(kind: str, index: int = 0) -> bool:
    """Whether device `kind:index` is on this machine; asked of torch once a device."""
    if kind not in ACCELERATORS:
        return True
    known = _present.get((kind, index))
    if known is None:
        known = _present[(kind, index)] = _ask_torch(kind, index)
    return known


def is_replaced(kind: str) -> bool:
    """Whether the script was already given the managed device where it asked for one of this kind."""
    return kind in _replaced


def device(value: Any) -> Any:
    """`value`, or the managed device where `value` names a device that is not here. Its type is kept."""
    torch = torch_module()
    if value is None or torch is None:
        return value
    named = _named(value, torch)
    if named is None or is_present(*named):
        return value
    _announce(*named)
    return torch.device(_managed) if isinstance(value, torch.device) else _managed


def device_type(value: Any) -> Any:
    """The kind of device autocast and gradient scalers are made for.

    torch turns both off, with a warning, where their device is absent; a script that runs under `python`
    that way must not change. So they follow only a script that was given the managed device before.
    """
    if isinstance(value, str) and is_replaced(value) and not is_present(value):
        return _managed.split(":", maxsplit=1)[0]
    return value


def map_location(value: Any = None) -> Any:
    """The `map_location` of `torch.load`: absent devices in the argument and in the file become managed."""
    if isinstance(value, dict):
        return {source: device(target) for source, target in value.items()}
    if value is None and torch_module() is not None:
        return _locate
    return device(value)


def pin_memory(value: Any) -> Any:
    """The `pin_memory` of a new tensor: False where no accelerator could read pinned memory."""
    return value if not value or any_accelerator() else False


def device_ids(value: Any) -> Any:
    """The `device_ids` or `output_device` of DistributedDataParallel: None, as for any CPU module, without CUDA."""
    return value if value is None or managed_for("cuda") is None else None


def backend(value: Any) -> Any:
    """The backend of a process group: "gloo" in place of "nccl" where CUDA is absent."""
    return "gloo" if isinstance(value, str) and "nccl" in value and managed_for("cuda") else value


def keywords(options: Any) -> Any:
    """The ``**options`` of a call of torch's, absent devices replaced; the very same object where there are none."""
    if not isinstance(options, dict):
        return options
    routed = {name: route(options[name]) for name, route in KEYWORDS.items() if name in options}
    return options if all(options[name] is value for name, value in routed.items()) else {**options, **routed}


def any_accelerator() -> bool:
    """Whether torch sees any accelerator here."""
    torch = torch_module()
    return torch is not None and (is_present("cuda") or is_present("xpu") or is_present("mps"))


# The keywords by which torch's functions are told a device, and what routes their values.
KEYWORDS: dict[str, Callable[[Any], Any]] = {
    "device": device,
    "device_type": device_type,
    "map_location": map_location,
    "pin_memory": pin_memory,
}


def managed_for(kind: str, index: int = 0) -> str | None:
    """The managed device when `kind:index` is absent (and say so once), else None."""
    if torch_module() is None or is_present(kind, index):
        return None
    _announce(kind, index)
    return _managed


def _locate(storage: Any, location: str) -> Any:
    """Leave a storage where the file says, or on the managed device when that is not here."""
    named = _parse(location)
    if named is None or is_present(*named):
        return None  # torch's own restoring
    _announce(*named)
    return storage if _managed == "cpu" else storage.to(device=_managed)


def _named(value: Any, torch: ModuleType) -> tuple[str, int] | None:
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


def _ask_torch(kind: str, index: int) -> bool:
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
        tell(f"gemini: {kind}:{index} is not on this machine: using {_managed}")


def _is_quiet() -> bool:
    """Whether `gemini_python --quiet` started this process."""
    module = sys.modules.get("gemini.launcher.process.launch_session")
    session = module.current() if module is not None else None
    return session is not None and bool(session["quiet"])
