"""CUDA stubs: replacements of `torch.cuda.…` functions on machines without CUDA.

Only names that raise without CUDA are replaced; functions that work without a GPU (`is_available`, `device_count`,
`manual_seed`, `empty_cache`, `memory_allocated`, …) are PyTorch's. A stub behaves as on a machine whose only device is
the managed one: synchronising returns at once, device 0 is current, events read the clock, pinned memory is memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from types import ModuleType
from typing import Any

from gemini.instrument.names.device_names import CUDA_STUBS
from gemini.launcher.script_api.device_methods import cuda
from gemini.launcher.script_api.script_devices import (
    device_type,
    is_present,
    is_replaced,
    replacement_for,
    torch_module,
)


class ClockEvent:
    """A CUDA event that reads the clock: work on the managed device is synchronous."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        replacement_for("cuda")
        self._enable_timing = enable_timing
        self._time: float | None = None

    def record(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: ClockEvent) -> float:
        """Return the milliseconds from this event to `end_event`."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000.0

    def query(self) -> bool:
        """Return True: recorded work is always done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self, *_: Any) -> None:
        """Return at once."""


class SynchronousStream:
    """A CUDA stream with synchronous work."""

    def __init__(self, *_: Any, priority: int = 0, **__: Any) -> None:
        replacement_for("cuda")
        self.priority = priority

    def __enter__(self) -> SynchronousStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record_event(self, event: ClockEvent | None = None) -> ClockEvent:
        """Record `event`, or a new one."""
        event = event or ClockEvent()
        event.record()
        return event

    def query(self) -> bool:
        """Return True: work is always done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def wait_event(self, *_: Any) -> None:
        """Return at once."""

    def wait_stream(self, *_: Any) -> None:
        """Return at once."""


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of the managed device, for `get_device_properties`."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def _properties(*_: Any) -> DeviceProperties:
    return DeviceProperties(_name(), _memory(), os.cpu_count() or 1)


def _name(*_: Any) -> str:
    import platform

    return platform.processor() or platform.machine() or "cpu"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_and_total(*_: Any) -> tuple[int, int]:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), _memory()


@lru_cache(maxsize=1)
def _the_stream() -> SynchronousStream:
    return SynchronousStream()


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _rng(name: str) -> Callable[..., Any]:
    """Return the CPU generator function `name`, called without a device argument."""

    def call(*args: Any, **_: Any) -> Any:
        function = getattr(torch_module(), name)
        return function(*args[:1]) if name.startswith("set") else function()

    return call


# torch.<name> → its replacement.
REPLACEMENTS: dict[str, Any] = {
    "cuda.Event": ClockEvent,
    "cuda.Stream": SynchronousStream,
    "cuda.current_device": lambda: 0,
    "cuda.current_stream": lambda *_, **__: _the_stream(),
    "cuda.default_stream": lambda *_, **__: _the_stream(),
    "cuda.device": _context,
    "cuda.get_device_capability": lambda *_, **__: (0, 0),
    "cuda.get_device_name": _name,
    "cuda.get_device_properties": _properties,
    "cuda.get_rng_state": _rng("get_rng_state"),
    "cuda.init": _do_nothing,
    "cuda.initial_seed": _rng("initial_seed"),
    "cuda.ipc_collect": _do_nothing,
    "cuda.mem_get_info": _free_and_total,
    "cuda.memory_summary": lambda *_, **__: "no CUDA memory on this machine",
    "cuda.nvtx.mark": _do_nothing,
    "cuda.nvtx.range": _context,
    "cuda.nvtx.range_pop": _do_nothing,
    "cuda.nvtx.range_push": _do_nothing,
    "cuda.reset_accumulated_memory_stats": _do_nothing,
    "cuda.reset_max_memory_allocated": _do_nothing,
    "cuda.reset_max_memory_cached": _do_nothing,
    "cuda.reset_peak_memory_stats": _do_nothing,
    "cuda.set_device": _do_nothing,
    "cuda.set_per_process_memory_fraction": _do_nothing,
    "cuda.set_rng_state": _rng("set_rng_state"),
    "cuda.set_stream": _do_nothing,
    "cuda.synchronize": _do_nothing,
    "Tensor.cuda": cuda,
    "nn.Module.cuda": cuda,
}
# For the managed device, once a device of the script was replaced by it: see `device_type`.
SCALERS = {"cuda.amp.autocast": "amp.autocast", "cuda.amp.GradScaler": "amp.GradScaler"}

_by_identity: dict[int, str] = {}


def stand_in(value: Any) -> Any:
    """Return `value`, a CUDA function or class of PyTorch, or its replacement where CUDA is absent."""
    torch = torch_module()
    if torch is None or is_present("cuda"):
        return value
    if not _by_identity:
        _by_identity.update(_identities(torch))
    name = _by_identity.get(id(value), "")
    if name in SCALERS:
        return partial(_attribute(torch, SCALERS[name]), device_type("cuda")) if is_replaced("cuda") else value
    if name.endswith("Tensor"):
        return getattr(torch, name.rpartition(".")[2])
    return _announce_when_called(REPLACEMENTS[name]) if name else value


@cache
def _announce_when_called(replacement: Any) -> Any:
    """Return `replacement`, which announces the absent device when it is called, not when it is referenced."""
    if isinstance(replacement, type):
        return replacement  # its __init__ announces

    @wraps(replacement)
    def act(*args: Any, **kwargs: Any) -> Any:
        replacement_for("cuda")
        return replacement(*args, **kwargs)

    return act


def tensor_type(value: Any) -> Any:
    """Return the name of a tensor type, such as ``"torch.cuda.FloatTensor"``, or its CPU form where CUDA is absent."""
    if isinstance(value, str) and value.startswith("torch.cuda.") and torch_module() and not is_present("cuda"):
        return value.replace("torch.cuda.", "torch.", 1)
    return value


def _identities(torch: ModuleType) -> Iterator[tuple[int, str]]:
    for qualified in CUDA_STUBS:
        name = qualified.removeprefix("torch.")
        found = _attribute(torch, name)
        # Replacements by the program (`torch.cuda.synchronize = lambda: None`) stay.
        if found is not None and (getattr(found, "__module__", None) or "torch").startswith("torch"):
            yield id(found), name


def _attribute(torch: ModuleType, dotted: str) -> Any:
    found: Any = torch
    for part in dotted.split("."):
        found = getattr(found, part, None)
    return found
