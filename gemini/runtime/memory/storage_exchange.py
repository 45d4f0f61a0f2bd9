"""Storage exchange: gives storages other memory in place, so that every tensor on them moves along.

    before   parameter ─┐                       exchange(storage, other)     after   parameter ─┐
             its views ─┼─► storage ─► memory A                                      its views ─┼─► storage ─► memory B
             copies of `p.data` ┘     other ─► memory B                              …          ┘    other ─► memory A

torch does the same in `Tensor.share_memory_`, but into one file per storage. A storage refers to its memory by a
`DataPtr`: address, deleter and context of the deleter, in three words of the `StorageImpl`; the words of two storages
of equal size on one device are exchanged. The offset of the words is searched, and tried on throw-away storages before
the first use: where that fails, nothing is exchanged.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_SEARCHED = 8  # words of a StorageImpl: its virtual table, its reference counts, then the DataPtr
_PROBE = 4096  # bytes of a throw-away storage

_move = ctypes.PyDLL(None).memmove  # keeps the GIL: no other thread sees half of an exchange
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move.restype = ctypes.c_void_p


class MemoryOwner(NamedTuple):
    """How the memory of a storage is referred to, and freed: `deleter(context)`."""

    address: int
    deleter: int
    context: int


_SIZE = len(MemoryOwner._fields) * _WORD


class _Memory(bytearray):
    """Bytes whose end can be observed."""


def owner_of(storage: torch.UntypedStorage) -> MemoryOwner:
    """Return the owner of a storage's memory; the layout of its device must be known."""
    storage.data_ptr()  # a lazy copy gets memory of its own
    offset = _find_offset()
    assert offset is not None
    return MemoryOwner(*(ctypes.c_uint64 * len(MemoryOwner._fields)).from_address(storage._cdata + offset))


def exchange(ones: Sequence[torch.UntypedStorage], others: Sequence[torch.UntypedStorage]) -> None:
    """Exchange the memory of storages pairwise: of equal size, on one device with `can_exchange`."""
    for one, other in zip(ones, others, strict=True):
        if (one.nbytes(), one.device) != (other.nbytes(), other.device):
            raise ValueError(f"storages of {one.nbytes()} and {other.nbytes()} bytes on {one.device}, {other.device}")
        one.data_ptr(), other.data_ptr()  # lazy copies get memory of their own
    offset = _find_offset()
    if offset is None:
        raise RuntimeError(f"the layout of storages of torch {torch.__version__} is not known")
    _exchange_words([one._cdata + offset for one in ones], [other._cdata + offset for other in others])


def can_exchange(device: torch.device) -> bool:
    """Return whether the memory of storages on a device can be exchanged; tried once per device."""
    return _works(str(device))


def _exchange_words(ones: Sequence[int], others: Sequence[int]) -> None:
    """Exchange three words at each pair of addresses.

    All moves run in one loop in C: no signal handler and no other thread runs between them.
    """
    saved = ctypes.create_string_buffer(_SIZE)
    between = ctypes.addressof(saved)
    targets = [at for one, other in zip(ones, others, strict=True) for at in (between, one, other)]
    sources = [at for one, other in zip(ones, others, strict=True) for at in (one, other, between)]
    deque(map(_move, targets, sources, [_SIZE] * len(targets)), 0)


# ── the trial ─────────────────────────────────────────────────────────────────────────────────────────────────────
@functools.lru_cache(maxsize=1)
def _find_offset() -> int | None:
    """Return the offset of the DataPtr in a StorageImpl; None where it is not found."""
    with torch.inference_mode(False):
        probes = [torch.empty(size, dtype=torch.uint8) for size in (_PROBE, _PROBE + 1)]
        probes.append(torch.frombuffer(_Memory(_PROBE), dtype=torch.uint8))
    places = set()
    for storage in (probe.untyped_storage() for probe in probes):
        words = [*(ctypes.c_uint64 * _SEARCHED).from_address(storage._cdata)]
        address = storage.data_ptr()
        places.add(words.index(address) if address in words else -1)
    place = places.pop()
    return place * _WORD if not places and 0 <= place <= _SEARCHED - len(MemoryOwner._fields) else None


@functools.lru_cache(maxsize=64)
def _works(device: str) -> bool:
    """Try an exchange on a device: views move along, and memory is freed once, with its last storage."""
    offset = _find_offset()
    if offset is None or not _frees_once(offset):
        return False
    with torch.inference_mode(False):
        ones, others = (torch.full((_PROBE,), value, dtype=torch.uint8, device=device) for value in (1, 2))
    view, places = ones[_PROBE // 2 :], (ones.data_ptr(), others.data_ptr())
    exchange([ones.untyped_storage()], [others.untyped_storage()])
    moved = (others.data_ptr(), ones.data_ptr()) == places and view.data_ptr() == places[1] + _PROBE // 2
    return moved and bool((view == 2).all()) and bool((others == 1).all())


def _frees_once(offset: int) -> bool:
    with torch.inference_mode(False):
        ones, memory = torch.ones(_PROBE, dtype=torch.uint8), _Memory(b"\2" * _PROBE)
        freed, others = weakref.ref(memory), torch.frombuffer(memory, dtype=torch.uint8)
    del memory
    _exchange_words([ones.untyped_storage()._cdata + offset], [others.untyped_storage()._cdata + offset])
    view, values = ones[1:], (int(ones.sum()), int(others.sum()))
    del others
    was_held = freed() is not None
    del ones
    was_held = was_held and freed() is not None
    del view
    return was_held and freed() is None and values == (2 * _PROBE, _PROBE)
