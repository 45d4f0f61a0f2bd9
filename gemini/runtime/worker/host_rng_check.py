"""Host RNG check: whether a module has used Python's or NumPy's random numbers.

Only modules use these generators in a worker, and none of them may, so each generator has one known state and one
comparison after a call shows whether it still has. The comparison reads the memory of the generators; requesting their
state creates hundreds of objects.

A call that has used them is refused, and the state is restored. Every use is therefore detected: the known state holds
no second number of a pair of normal numbers, which would be returned without a step, and no seed leads to it, since it
was seeded by the system.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np

_WORDS = 624  # of a Mersenne Twister; the place of the next one stands before (Python) or behind them (NumPy)
_SIZE = (_WORDS + 1) * 4  # bytes
_differ = ctypes.PyDLL(None).memcmp
_differ.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]


class HostRngCheck:
    """The known state of the generators of this process."""

    def __init__(self) -> None:
        self._python = address_in_python()
        self._numpy = int(np.random.get_bit_generator().ctypes.state_address)  # type: ignore[attr-defined]
        random.seed()
        np.random.seed()
        self._rest = random.getstate(), np.random.get_state()
        self._seen = [ctypes.string_at(at, _SIZE) if at else b"" for at in (self._python, self._numpy)]

    def was_used(self) -> bool:
        """Return whether they were used since the last check; restore their state if so."""
        python, other = self._seen
        if not _differ(self._numpy, other, _SIZE) and (
            not _differ(self._python, python, _SIZE) if python else random.getstate() == self._rest[0]
        ):
            return False
        random.setstate(self._rest[0])
        np.random.set_state(self._rest[1])
        return True


def address_in_python() -> int:
    """Return the address of the state of Python's generator; 0 if the memory layout is unknown."""
    source: Any = random.random.__self__  # type: ignore[attr-defined]
    start, kind = object.__basicsize__, random.Random.__base__
    if kind is None or kind.__basicsize__ < start + _SIZE:
        return 0
    _, (*words, place), _ = source.getstate()
    expected = b"".join(word.to_bytes(4, "little") for word in (place, *words))
    return id(source) + start if ctypes.string_at(id(source) + start, _SIZE) == expected else 0
