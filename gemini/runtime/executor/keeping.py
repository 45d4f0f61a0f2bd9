"""Memory that a worker frees in a step stays with it: the next micro-batch needs as much again.

The C library returns large blocks to the system when they are freed, and the system clears every page when it is
touched again: a tenth of the time of a step. A worker that runs steps keeps them.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes: the C library takes no larger threshold


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed; whether it will."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))
