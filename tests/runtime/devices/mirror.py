"""A device for tests: main memory in files, with its own generator and memory counter.

Its tensors are torch's CPU tensors, but they cross in files, by path, with nothing of `Cpu` in it: a
back end that works here works by the interface alone.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemini.runtime.devices.base import Device

done: Counter[str] = Counter()  # what this process has asked of devices
LIMIT = 1 << 30


class FileSegment:
    """An unnamed file; others open it by way of its owner's descriptors."""

    def __init__(self, size: int, path: str = "") -> None:
        self.size = size
        self.file: Any = Path(path).open("r+b") if path else tempfile.TemporaryFile()  # noqa: SIM115
        if not path:
            self.file.truncate(size)
        self.memory = memoryview(mmap.mmap(self.file.fileno(), size))

    def view(self, offset: int, size: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        part = self.memory[offset : offset + size]
        if freed is not None:
            weakref.finalize(part, freed).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def shared(self) -> tuple[bytes, tuple[int, ...]]:
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}".encode(), ()

    def was_shared(self) -> None:
        done["was_shared"] += 1


class Mirror(Device):
    kind = "mirror"
    generator = b"0"

    @property
    def where(self) -> torch.device:
        return torch.device("cpu")

    def obstacle(self) -> str:
        return "" if self.index < 2 else "there are 2 mirrors"

    def allocate(self, size: int) -> FileSegment:
        done["allocate"] += 1
        if size > LIMIT:
            raise torch.OutOfMemoryError(f"the mirror has no {size} bytes")
        return FileSegment(size)

    def open(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> FileSegment:
        assert not descriptors
        done["open"] += 1
        return FileSegment(size, os.fsdecode(shared))

    def prepare(self) -> None:
        done["prepare"] += 1

    def get_generator(self, device: torch.device) -> bytes:
        return Mirror.generator

    def set_generator(self, device: torch.device, state: bytes) -> None:
        Mirror.generator = state

    def finish(self) -> None:
        done["finish"] += 1

    def trim(self) -> None:
        done["trim"] += 1


def draw() -> int:
    """A number of the mirror's own generator."""
    Mirror.generator = str(int(Mirror.generator) * 5 % 97 + 3).encode()
    return int(Mirror.generator)
