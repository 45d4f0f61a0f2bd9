"""The C library's allocator: whether memory that is freed stays with the process.

By itself the C library returns large blocks to the system when they are freed, and the system clears every page when
it is touched again: a tenth of the time of a step, a quarter where the batch is small and the model large. How much it
returns depends on what the process freed before, so one and the same step takes different times. A worker that runs
steps keeps what it frees, as the next micro-batch needs as much again; a profile measures nodes in the same state.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes: the C library takes no larger threshold, and comes to this one by itself
_NEVER = 2**31 - 1
_LARGE_IDLE = 32 << 20  # bytes of idle memory that are worth a trim
_PAUSE = 0.005  # seconds between two measurements of the idle memory, at least
_SHARE = 100  # measuring takes at most 1/100 of the time: it is slow in a fragmented heap
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_next_check = [0.0]  # a time.monotonic()


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def keep_freed_memory() -> bool:
    """Ask the C library to keep what is freed; whether it will."""
    library = _library()
    if library is None:
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, _NEVER))


@contextmanager
def freed_memory_kept(sizes: Iterable[int] = ()) -> Iterator[None]:
    """Freed memory stays with the process for a while; at the end what is free is returned to the system.

    Blocks of `sizes` bytes are taken, touched and freed at once, so that the first who needs them finds them.

    Afterwards the C library is as it makes itself once a program has freed blocks of the largest size.
    """
    kept = keep_freed_memory()
    try:
        if kept:
            blocks = [torch.zeros(size, dtype=torch.uint8) for size in sizes if size <= _LARGEST]
            del blocks
        yield
    finally:
        library = _library()
        if kept and library is not None:
            library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
            library.malloc_trim(0)


def trim() -> None:
    """Return the idle memory of the heap to the system."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def trim_if_large() -> None:
    """Return idle memory to the system where there is much of it; rate-limited, since measuring it takes time.

    The C library retains freed memory for later use. On one device the next forward uses it; a controller's next
    forward runs in the workers, which lack the memory that lies idle in the controller.
    """
    began = time.monotonic()
    if began < _next_check[0]:
        return
    library = _library()
    has_info = library is not None and hasattr(library, "mallinfo2")
    idle = library.mallinfo2().fordblks if library is not None and has_info else 0
    ended = time.monotonic()
    _next_check[0] = ended + max(_PAUSE, _SHARE * (ended - began))
    if library is not None and idle > _LARGE_IDLE:
        library.malloc_trim(0)


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The C library, where it is one that can be told."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
