"""The C library's allocator: whether memory that is freed stays with the process.

By itself the C library returns large blocks to the system when they are freed, and the system clears every page when
it is touched again: a tenth of the time of a step, a quarter where the batch is small and the model large. How much it
returns depends on what the process freed before, so one and the same step takes different times. A worker that runs
steps keeps what it frees, as the next micro-batch needs as much again; a profile measures nodes in the same state.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes: the C library takes no larger threshold, and comes to this one by itself
_NEVER = 2**31 - 1


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


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The C library, where it is one that can be told."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
