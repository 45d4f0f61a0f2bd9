"""Shared-memory group: shards in processes of one host.

    header   per shard: number of its last collective (a futex), and per slot: order hash, bytes, shape
    slots    two per shard; a collective uses the slot of its number's parity

A shard copies its tensor into its slot, publishes the number of the collective, waits until all others have published
the same number, and reads their slots in place. Two slots suffice: a shard publishes number n only after it has read
everything of number n - 1, so a slot is free when its turn comes again.

A waiting shard spins for about 0.1 ms, then sleeps in the kernel; it wakes up regularly to check whether the step has
been abandoned. Plain stores are published in order on x86 only; other processors have no such groups (`is_supported`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable, Sequence

import torch

from gemini.collectives.shard_group import ExchangeGroup

SLOT = 128 << 20  # bytes of address space per slot: memory is used only where tensors are written
_HEADER = 1024  # bytes per shard
_WORDS = _HEADER // 8
_SLOT_WORDS, _DIMS = 16, 12
_SPINS = 2000
_SLEEP = 0.02  # seconds between checks
_FUTEX = {"x86_64": 202, "AMD64": 202}
_WAIT, _WAKE = 0, 1
_SPAN = 1 << 31  # collective numbers are those of a futex: 32 bits


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Return whether this host can have shared-memory groups."""
    return hasattr(os, "memfd_create") and platform.machine() in _FUTEX


def allocate_group(size: int, slot: int = SLOT) -> int:
    """Return the descriptor of the memory of a group; the caller passes it to all members and closes it."""
    descriptor = os.memfd_create("gemini-group")
    os.ftruncate(descriptor, size * (_HEADER + 2 * slot))
    return descriptor


class SharedMemoryGroup(ExchangeGroup):
    """The group as one process sees it; `check` is called while it waits, and raises where the step is abandoned."""

    def __init__(self, descriptor: int, rank: int, size: int, check: Callable[[], None] = lambda: None) -> None:
        super().__init__(rank, size)
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._slot = (len(self._memory) // size - _HEADER) // 2
        self._numbers = memoryview(self._memory).cast("i")
        self._words = memoryview(self._memory)[: size * _HEADER].cast("q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._check, self._number = check, 0
        self._views: dict[tuple[int, int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._futex = _FUTEX[platform.machine()]
        self._time = _Time(0, int(_SLEEP * 1e9))

    def exchange(self, x: torch.Tensor, name: str, parts: int = 1) -> Sequence[torch.Tensor]:
        """Return the tensors of all shards, by rank; they are valid until the next exchange but one."""
        order = self.count(name, x, parts)
        if x.numel() * x.element_size() > self._slot:
            return self._exchange_pieces(x, order)
        return self._exchange_whole(x, order)

    def _exchange_whole(self, x: torch.Tensor, order: int) -> list[torch.Tensor]:
        self._number = number = (self._number + 1) % _SPAN
        slot, shape = number % 2, tuple(x.shape)
        self._view(self.rank, slot, x.dtype, shape).copy_(x.detach())
        words, at = self._words, self.rank * _WORDS + _SLOT_WORDS * (slot + 1)
        words[at], words[at + 1] = order, len(shape)
        for dim, size in enumerate(shape):
            words[at + 2 + dim] = size
        self._numbers[self.rank * _HEADER // 4] = number
        self._syscall(self._futex, self._address(self.rank), _WAKE, _SPAN - 1, None, None, 0)
        found: list[torch.Tensor] = []
        for rank in range(self.size):
            if rank != self.rank:
                self._wait(rank, number)
                shape = self._shape_of(rank, slot, order)
            found.append(self._view(rank, slot, x.dtype, tuple(x.shape) if rank == self.rank else shape))
        return found

    def _exchange_pieces(self, x: torch.Tensor, order: int) -> list[torch.Tensor]:
        """Exchange a tensor that is larger than a slot: copies, piece by piece."""
        shapes = [tuple(one.tolist()) for one in self._exchange_whole(torch.tensor(x.shape, dtype=torch.int64), order)]
        flat, size = x.detach().reshape(-1), self._slot // x.element_size()
        wholes = [x.new_empty(shape) for shape in shapes]
        most = max(whole.numel() for whole in wholes)
        for start in range(0, most, size):
            pieces = self._exchange_whole(flat[start : start + size], order)
            for whole, piece in zip(wholes, pieces, strict=True):
                whole.view(-1)[start : start + size].copy_(piece)
        return wholes

    def _shape_of(self, rank: int, slot: int, order: int) -> tuple[int, ...]:
        words, at = self._words, rank * _WORDS + _SLOT_WORDS * (slot + 1)
        if words[at] != order:
            self.check_order([order if other == self.rank else words[at] for other in range(self.size)])
        return tuple(words[at + 2 : at + 2 + words[at + 1]])

    # ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────
    def _wait(self, rank: int, number: int) -> None:
        """Wait until a shard has published a number."""
        numbers, at = self._numbers, rank * _HEADER // 4
        for _ in range(_SPINS):
            if numbers[at] == number:
                return
        while (seen := numbers[at]) != number and seen != (number + 1) % _SPAN:  # it may be one further
            self._syscall(self._futex, self._address(rank), _WAIT, seen, ctypes.byref(self._time), None, 0)
            if numbers[at] == seen:
                self._check()

    def _address(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + rank * _HEADER)

    def _view(self, rank: int, slot: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        key = rank, slot, dtype, shape
        if key not in self._views:
            if len(self._views) > 4096:
                self._views.clear()
            count = 1
            for size in shape:
                count *= size
            offset = self.size * _HEADER + (2 * rank + slot) * self._slot
            if count:
                flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            self._views[key] = flat.view(shape) if count else torch.empty(shape, dtype=dtype)
        return self._views[key]
