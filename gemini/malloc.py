"""C allocator: whether freed memory stays with the process.

By default the C library returns large blocks to the system when they are freed, and the system clears every page when
it is touched again: a tenth of the time of a step, a quarter if the batch is small and the model large. How much is
returned depends on earlier frees, so the same step takes different times. A worker that runs steps retains freed
memory, since the next micro-batch needs as much again; a profile measures nodes in the same state.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes: the largest threshold of the C library, which it also reaches by itself
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
    """Configure the C library to retain freed memory; return whether it does."""
    library = _library()
    if library is None:
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, _NEVER))


@contextmanager
def retain_freed_memory(sizes: Iterable[int] = ()) -> Iterator[None]:
    """Retain freed memory for a while; at the end, free memory is returned to the system.

    Blocks of `sizes` bytes are allocated, touched and freed first, so that the first user finds them. Afterwards the C
    library is configured as after a program has freed blocks of the largest size.
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
    """Return the C library if it can be configured, else None."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
