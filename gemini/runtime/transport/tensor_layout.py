"""Tensor layout: where a tensor lies in a shared segment, as plain data from which another process rebuilds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gemini.runtime.devices.base import Segment


@dataclass(frozen=True)
class TensorLayout:
    """The position of one tensor in a segment."""

    offset: int
    size: int  # bytes of its storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # of the tensor in its storage, in elements
    is_parameter: bool
    requires_grad: bool

    def open(self, segment: Segment) -> torch.Tensor:
        """Return the tensor in a process that has opened the segment."""
        found = self.view(segment.view(self.offset, self.size))
        return nn.Parameter(found, self.requires_grad) if self.is_parameter else found

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the bytes of its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.start, self.shape, self.stride)
