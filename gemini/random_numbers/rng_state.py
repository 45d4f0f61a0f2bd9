"""Generator states as bytes, sent with every call so that workers use the script's random numbers.

The state of the CPU generator comes first and has a fixed size; that of the device, if any, follows.

Every call needs the state, and usually it is unchanged. So the memory of the generator is compared first; reading the
state through torch costs ten times as much and is the fallback for an unknown memory layout.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import torch

_WORDS = 624  # of a Mersenne Twister
_BEFORE = 20  # bytes of seed, position and flags before the words
_BEHIND = 28  # bytes after them: the cached second normal numbers
_HEAD = 24  # bytes before the words in a state, where each word takes eight
_REACH = 256  # bytes within which the words begin
_library = ctypes.PyDLL(None)  # keeps the GIL: no other thread uses the generator meanwhile
_compare = _library.memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]


class DeviceGenerators(Protocol):
    """A device that reads and writes the generators of its kind."""

    @property
    def where(self) -> torch.device:
        """The device itself."""

    def get_generator(self, device: torch.device) -> bytes:
        """Return the state of the generator of `device`."""

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Restore the state of the generator of `device`."""


class CpuGenerator:
    """A generator of the CPU, and its last observed state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.address = self._find()
        self.size = _BEFORE + 4 * _WORDS + _BEHIND
        self._seen, self._state = b"", b""

    def state(self) -> bytes:
        """Return its current state; the same object as long as it is unchanged."""
        if self._seen and not _compare(self.address, self._seen, self.size):
            return self._state
        before = self._look()
        found = self._ask()
        if before == self._look():
            self._seen, self._state = before, found
        return found

    def _look(self) -> bytes:
        return ctypes.string_at(self.address, self.size) if self.address else b""

    def _ask(self) -> bytes:
        found: torch.Tensor = self.generator.get_state()
        return ctypes.string_at(found.data_ptr(), found.numel())

    def _find(self) -> int:
        """Return the address of its memory; 0 where the layout is unknown."""
        start = int(getattr(self.generator, "_cdata", 0))
        words = self._ask()[_HEAD : _HEAD + 8 * _WORDS]
        if not start or len(words) != 8 * _WORDS:
            return 0
        memory = ctypes.string_at(start, _REACH + 4 * _WORDS)
        found = memory.find(b"".join(words[at : at + 4] for at in range(0, len(words), 8)))
        return start + found - _BEFORE if found > _BEFORE else 0


def _is_known() -> bool:
    """Return whether the compared memory shows every change, cached second normal numbers included."""
    trial = torch.Generator()
    trial.manual_seed(0)
    looked = CpuGenerator(trial)
    if not looked.address:
        return False
    for draw in ("random_", "normal_", "normal_", "exponential_"):
        before = looked.state()
        getattr(torch.empty(1, dtype=torch.float64, device="cpu"), draw)(generator=trial)
        if looked.state() == before or looked.state() != looked._ask():
            return False
    before = looked.state()
    trial.manual_seed(1)
    return looked.state() != before and looked.state() == looked._ask()


_CPU = CpuGenerator(torch.default_generator)
if not _is_known():
    _CPU.address = 0


def get_state(device: DeviceGenerators | None = None, at: torch.device | None = None) -> bytes:
    """Return the states of this process: the CPU's, and that of a device or of another one of its kind, `at`."""
    state = _CPU.state()
    return state if device is None else state + device.get_generator(at or device.where)


def set_state(state: bytes, device: DeviceGenerators | None = None, at: torch.device | None = None) -> None:
    """Restore the generators of this process."""
    now = _CPU.state()
    size = len(now)
    if state[:size] != now:
        torch.default_generator.set_state(_tensor(state[:size]))
    if device is not None and len(state) > size:
        device.set_generator(at or device.where, state[size:])


@functools.lru_cache(maxsize=4)  # consecutive calls without random ops have the same state
def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
