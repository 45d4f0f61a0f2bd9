"""Storage aliases: tensors that share memory, and the order of nodes that follows.

Dataflow alone does not order an in-place write against the readers of other views of the same memory:

    y = x[0]        reads x
    y.add_(1)       writes the memory of x
    z = x * 2       reads x, and must come after the write though only x flows into it

Writes are found by tensor versions, so in-place ops inside modules count too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class StorageTable:
    """Maker, last writer and later readers of every storage."""

    def __init__(self) -> None:
        self.maker: dict[int, int] = {}
        self.writer: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        self.alive: dict[int, weakref.ref[Any]] = {}  # an id may be reused

    @staticmethod
    def version(tensor: torch.Tensor) -> int:
        """Return the count of in-place writes; -1 where torch has none (inference tensors)."""
        return -1 if tensor.is_inference() else int(tensor._version)

    def versions(self, inputs: list[torch.Tensor]) -> list[int]:
        """Return the versions of several tensors."""
        return [self.version(tensor) for tensor in inputs]

    def made_by(self, node: int, tensor: torch.Tensor) -> int:
        """Return the node that allocated the storage of a tensor, which `node` returns."""
        memory = self._memory(tensor)
        return self.maker.setdefault(memory, node) if memory else node

    def order(self, node: int, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> set[int]:
        """Return the nodes that must precede `node`, which reads `inputs` and writes `written`."""
        after: set[int] = set()
        writes = {self._memory(tensor) for tensor in written}
        for memory in {self._memory(tensor) for tensor in inputs} - {0}:
            if memory in self.writer:
                after.add(self.writer[memory])
            if memory in writes:
                after.update(self.readers.pop(memory, ()))
                self.writer[memory] = node
            else:
                self.readers.setdefault(memory, []).append(node)
        after.discard(node)
        return after

    def _memory(self, tensor: torch.Tensor) -> int:
        """Return the id of a tensor's storage; entries of a freed storage with the same id are removed."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
            return 0
        key = int(storage._cdata)
        known = self.alive.get(key)
        if known is None or known() is None:
            self.maker.pop(key, None)
            for facts in (self.maker, self.writer, self.readers):
                facts.pop(key, None)
            self.alive[key] = weakref.ref(storage)
        return key
