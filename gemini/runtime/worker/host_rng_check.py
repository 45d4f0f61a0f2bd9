"""Draws: whether a unit has used Python's or NumPy's random numbers.

Nothing but units draws in a worker, and none of them may, so the generators rest: each has one state, and one look
after a call tells whether it still has. The look is at their memory; asking them for their state makes hundreds of
objects.

Whoever has drawn is refused, and the generators are put back. So a draw is always noticed: at rest no generator holds
the second of a pair of normal numbers, which it would give out without a step, and no seed leads to the state at rest,
which is the system's.
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
    """The generators of this process at rest."""

    def __init__(self) -> None:
        self._python = address_in_python()
        self._numpy = int(np.random.get_bit_generator().ctypes.state_address)  # type: ignore[attr-defined]
        random.seed()
        np.random.seed()
        self._rest = random.getstate(), np.random.get_state()
        self._seen = [ctypes.string_at(at, _SIZE) if at else b"" for at in (self._python, self._numpy)]

    def have_been_made(self) -> bool:
        """Whether any were made since the last look; then the generators are put to rest again."""
        python, other = self._seen
        if not _differ(self._numpy, other, _SIZE) and (
            not _differ(self._python, python, _SIZE) if python else random.getstate() == self._rest[0]
        ):
            return False
        random.setstate(self._rest[0])
        np.random.set_state(self._rest[1])
        return True


def address_in_python() -> int:
    """Where Python's generator has its state; 0 where that is not as in the interpreters we know."""
    source: Any = random.random.__self__  # type: ignore[attr-defined]
    start, kind = object.__basicsize__, random.Random.__base__
    if kind is None or kind.__basicsize__ < start + _SIZE:
        return 0
    _, (*words, place), _ = source.getstate()
    expected = b"".join(word.to_bytes(4, "little") for word in (place, *words))
    return id(source) + start if ctypes.string_at(id(source) + start, _SIZE) == expected else 0
