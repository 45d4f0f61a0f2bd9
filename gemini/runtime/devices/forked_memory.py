"""Forked memory: a forked process has copies of the memory that this process shares with its workers.

Under plain Python, a fork copies all memory on write. Shared mappings stay shared, as with `share_memory_` of torch: a
child would see what its parent trains later, and write into the parent's parameters. The child therefore puts private
pages in the place of its mappings, before any code of the script runs in it; addresses stay the same:

    parent   fork ─────────── waits ──────────► continues
    child      └─► copies the mappings ─► done ─► runs

Copying takes time and memory in proportion to the mappings, for every data loader worker as well: beyond a limit, the
child shares them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

_LIMIT = 128 << 20  # bytes of all mappings that are in use
_TIMEOUT_MS = 30_000  # the child may fail, or be stopped, before it is done
_MAYMOVE_FIXED = 3
_FAILED = ctypes.c_void_p(-1).value

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = _library.mremap.restype = ctypes.c_void_p
_library.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_mapped: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # shared mappings, with their inode
_DESCRIPTORS = Path("/proc/self/fd")


class _ForkState(threading.local):
    """What a forking thread prepares for its child."""

    pipe: tuple[int, int] | None = None
    files: dict[mmap.mmap, int] | None = None  # the descriptor of each mapping


_fork = _ForkState()
_shares = [False]  # whether this process uses mappings of the process that forked it


def track_mapping(mapped: mmap.mmap, descriptor: int) -> None:
    """Copy the mapping of an anonymous file in forked processes."""
    _mapped[mapped] = os.fstat(descriptor).st_ino


def tracked_mappings() -> list[mmap.mmap]:
    """Return the shared mappings of this process."""
    return list(_mapped)


def shares_with_parent() -> bool:
    """Return whether this is a forked process that uses memory of its parent: there was too much to copy."""
    return _shares[0]


def _before_fork() -> None:
    _fork.pipe, _fork.files = None, _find_files()
    try:
        used = sum(os.fstat(descriptor).st_blocks * 512 for descriptor in _fork.files.values())
        if _fork.files and used <= _LIMIT:
            _fork.pipe = os.pipe()
    except OSError:  # too many open files
        pass


def _find_files() -> dict[mmap.mmap, int]:
    """Return the descriptor that each mapping holds of its file."""
    wanted = {inode: mapped for mapped, inode in [*_mapped.items()]}
    found = {}
    for name in os.listdir(_DESCRIPTORS) if wanted else ():
        try:
            mapped = wanted.get(os.fstat(int(name)).st_ino)
        except OSError:  # of the listing itself
            continue
        if mapped is not None and _is_memory_file(int(name)):
            found[mapped] = int(name)
    return found


def _is_memory_file(descriptor: int) -> bool:
    """Return whether a descriptor is of an anonymous file, rather than of one with the same number on another disk."""
    return os.readlink(_DESCRIPTORS / str(descriptor)).startswith("/memfd:gemini")


def _after_in_parent() -> None:
    """Wait until the child has copied: the script would change the contents meanwhile."""
    _fork.files = None
    if _fork.pipe is None:
        return
    (done, end), _fork.pipe = _fork.pipe, None
    os.close(end)
    waiting = select.poll()
    waiting.register(done, select.POLLIN | select.POLLHUP)
    waiting.poll(_TIMEOUT_MS)
    os.close(done)


def _after_in_child() -> None:
    pipe, files = _fork.pipe, _fork.files or {}
    _fork.pipe = _fork.files = None
    found = tracked_mappings()
    _shares[0] = _shares[0] or (pipe is None and bool(found))
    if pipe is None:
        return
    try:
        copied = [mapped in files and _make_private(mapped, files[mapped]) for mapped in found]  # all of them
        _shares[0] = _shares[0] or not all(copied)
        _mapped.clear()  # private pages must not be released as if others mapped them
        os.write(pipe[1], b".")  # a process that another thread forks meanwhile may hold the pipe open
    finally:
        for descriptor in pipe:
            os.close(descriptor)


def _make_private(mapped: mmap.mmap, descriptor: int) -> bool:
    """Put private pages with the same contents at the addresses of a mapping; return whether there is memory."""
    size = -(-len(mapped) // mmap.PAGESIZE) * mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    copy = _library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy in (None, _FAILED):
        return False
    for begin, end in _used_ranges(descriptor, len(mapped)):
        ctypes.memmove(copy + begin, address + begin, end - begin)
    if _library.mremap(copy, size, size, _MAYMOVE_FIXED, address) != address:
        _library.munmap(copy, size)
        return False
    return True


def _used_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that have been written; reading others would allocate them."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # there are no more
            return
        end = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        yield begin, end


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
