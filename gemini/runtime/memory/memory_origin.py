"""Memory origin: who allocated the memory of a storage, and may hold its address.

    torch's allocator          nobody else holds it
    a private file mapping     weights of safetensors or `torch.load(mmap=True)`, which copies on write: nobody else
    an object of Python        `torch.from_numpy`, `torch.frombuffer`: the object, unless the storage is its only owner
    shared memory              other processes: `share_memory_`, tensors from queues
    another library            DLPack, extensions: unknown

Storages of the first two may get other memory. Origins are recognised by the deleter of the memory, compared with those
of throw-away storages.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemini.runtime.memory.storage_exchange import MemoryOwner, owner_of

_WORDS = 5  # of the context of an owning object: a pointer, then a function object that holds it
_MAPS = Path("/proc/self/maps")


class MemoryOrigins:
    """The origins of several storages; the file mappings of the process are read once."""

    def __init__(self) -> None:
        self._mappings: list[tuple[int, int]] | None = None

    def find_owner(self, storage: torch.UntypedStorage) -> str:
        """Return who may hold the address of a storage's memory; '' for nobody."""
        if not storage.nbytes():
            return ""
        owner = owner_of(storage)
        if owner.deleter == _allocator_deleter(str(storage.device)):
            return ""
        if storage.device.type != "cpu":
            return "an allocator other than torch's"
        if owner.deleter == _object_probe().deleter:
            return "" if _is_only_owner(owner) else "the object that it was made from (a NumPy array, for example)"
        if owner.deleter == _slice_deleter() and self._is_private_file(owner.address, storage.nbytes()):
            return ""
        return "other processes" if storage.is_shared() else "an allocator other than torch's"

    def _is_private_file(self, address: int, size: int) -> bool:
        if self._mappings is None:
            self._mappings = _private_file_mappings()
        at = bisect_right(self._mappings, (address, sys.maxsize)) - 1
        return at >= 0 and address + size <= self._mappings[at][1]


@functools.lru_cache(maxsize=64)
def _allocator_deleter(device: str) -> int:
    with torch.inference_mode(False):
        return owner_of(torch.empty(1, dtype=torch.uint8, device=device).untyped_storage()).deleter


@functools.lru_cache(maxsize=1)
def _slice_deleter() -> int:
    return owner_of(torch.UntypedStorage(2)[0:1]).deleter


@functools.lru_cache(maxsize=1)
def _object_probe() -> MemoryOwner:
    """Return the owner of the memory of an array, which is kept."""
    storage = torch.from_numpy(_PROBE).untyped_storage()
    _probes.append(storage)
    return owner_of(storage)


_PROBE = np.zeros(1, dtype=np.uint8)
_probes: list[torch.UntypedStorage] = []


def _context_words(owner: MemoryOwner) -> list[int]:
    return [*(ctypes.c_uint64 * _WORDS).from_address(owner.context)]


def _is_only_owner(owner: MemoryOwner) -> bool:
    """Return whether a storage is the only owner of an array, which has memory of its own.

    The context holds a function of C++ and the array that it releases; other functions hold other things.
    """
    probe, words = _context_words(_object_probe()), _context_words(owner)
    if probe.count(id(_PROBE)) != 1 or probe[0] == id(_PROBE):
        return False
    place = probe.index(id(_PROBE))
    if words[place + 1 :] != probe[place + 1 :]:
        return False
    held: Any = ctypes.cast(words[place], ctypes.py_object).value
    while type(held) is np.ndarray and sys.getrefcount(held) <= _ONE_REFERENCE:
        if held.base is None:
            return bool(held.flags.owndata)
        held = held.base
    return False


def _count_of_one() -> int:
    """Return what the reference count of an object with one owner is in the loop above."""
    owner = [np.zeros(1)]
    held = owner[0]
    return sys.getrefcount(held)


_ONE_REFERENCE = _count_of_one()


def _private_file_mappings() -> list[tuple[int, int]]:
    """Return the ranges of memory that are private mappings of files, in order; adjoining ones of a file as one."""
    found: list[tuple[int, int]] = []
    file = ""
    for line in _MAPS.read_text().splitlines():
        span, modes, _, device, inode, *_ = line.split()
        if modes[3] != "p" or inode == "0":
            continue
        begin, end = (int(one, 16) for one in span.split("-"))
        if found and found[-1][1] == begin and file == device + inode:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
        file = device + inode
    return found
