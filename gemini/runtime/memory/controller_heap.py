"""The heap of the controller: what it does not need while workers compute goes back to the system.

The C library keeps freed memory for later. On one device that later is the next forward; here the next forward is
elsewhere, and what lies idle in the controller is missing in the workers.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

_WORTH_IT = 32 << 20  # bytes that lie idle
_PAUSE = 0.005  # seconds between two looks, at the least
_SHARE = 100  # looking takes at most one part of so many of the time: in a heap of many pieces it takes long

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """The C library, if it can tell and trim; None otherwise."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _Info
    return library


def trim() -> None:
    """Return what is idle to the system."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


_next = [0.0]  # look


def give_back() -> None:
    """Return idle memory to the system where it is worth the time; looking costs some, so not too often."""
    began = time.monotonic()
    if began < _next[0]:
        return
    library = _library()
    idle = 0 if library is None else library.mallinfo2().fordblks
    ended = time.monotonic()
    _next[0] = ended + max(_PAUSE, _SHARE * (ended - began))
    if idle > _WORTH_IT:
        library.malloc_trim(0)
