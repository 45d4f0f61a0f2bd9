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
_PAUSE = 0.005  # seconds between two looks

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


_looked = [0.0]


def give_back() -> None:
    """Return idle memory to the system where it is worth the time; looking costs some, so not too often."""
    now = time.monotonic()
    if now - _looked[0] < _PAUSE:
        return
    _looked[0] = now
    library = _library()
    if library is not None and library.mallinfo2().fordblks > _WORTH_IT:
        library.malloc_trim(0)
