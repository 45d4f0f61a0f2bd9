"""The states of torch's generators as bytes: they travel with every call, so random numbers are the program's own.

The state of the CPU's generator comes first and has always the same size; that of the device, if any, follows.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from gemini.runtime.devices.base import Device


def get_state(device: Device | None = None, at: torch.device | None = None) -> bytes:
    """The states in this process: the CPU's, and that of a device or of another one of its kind, `at`."""
    found: torch.Tensor = torch.default_generator.get_state()
    state = ctypes.string_at(found.data_ptr(), found.numel())
    return state if device is None else state + device.get_generator(at or device.where)


def set_state(state: bytes, device: Device | None = None, at: torch.device | None = None) -> None:
    """Put the generators of this process in a state."""
    torch.default_generator.set_state(_tensor(state))
    size = _size()
    if device is not None and len(state) > size:
        device.set_generator(at or device.where, state[size:])


@functools.lru_cache(maxsize=4)  # call after call is made in one state, where nothing is drawn
def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state[: _size()]), dtype=torch.uint8)


@functools.lru_cache(maxsize=1)
def _size() -> int:
    return len(torch.get_rng_state())
