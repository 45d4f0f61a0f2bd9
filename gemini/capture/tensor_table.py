"""Known tensors: from tensor objects to what is known about them, without keeping them alive.

A trace that held every tensor it saw would need more memory than a training step. Tensors are known by identity, and
an identity may be given to another tensor once the first is gone; so each entry also remembers its tensor weakly.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class KnownTensors(Generic[T]):
    """A mapping from living tensors, by identity."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """What is known about a tensor."""
        found = self._entries.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def add(self, tensor: torch.Tensor, value: T) -> None:
        """Know a tensor from now on."""
        self._entries[id(tensor)] = weakref.ref(tensor), value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.get(tensor) is not None

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
