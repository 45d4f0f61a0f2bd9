"""Micro-batch inputs: whole tensors of which every micro-batch gets its slice, and plain values."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import SampleIndices, Shard


class MicrobatchInputs:
    """The arguments of the call, by port, or the operands of the loss, by number of the value."""

    def __init__(
        self, whole: list[tuple[Any, Any, int]], numbers: list[Any], tensors: list[Any], sizes: tuple[int, ...]
    ) -> None:
        self.sizes, self.total = sizes, sum(sizes)
        self.starts = [0, *accumulate(sizes)]
        self.whole = {name: (tensors[at], self._kind(tensors[at], dim)) for name, dim, at in whole}
        self.numbers = dict(numbers)

    def _kind(self, tensor: torch.Tensor, dim: Any) -> Shard | SampleIndices | None:
        """Return how the samples lie: in a dimension with a number of entries per sample, or as specified."""
        if dim is None:
            return None
        if isinstance(dim, tuple):
            return Shard(*dim) if len(dim) > 1 else SampleIndices(*dim)
        return Shard(dim, tensor.shape[dim] // self.total)

    def part(self, name: Any, mid: int) -> torch.Tensor:
        """Return the slice of one micro-batch, in the graph of the whole."""
        tensor: torch.Tensor
        tensor, kind = self.whole[name]
        if kind is None or len(self.sizes) == 1:
            return tensor
        if isinstance(kind, SampleIndices):  # every micro-batch counts its own samples
            return tensor.narrow(kind.dim, 0, self.sizes[mid])
        return kind.take(tensor, self.starts[mid], self.sizes[mid], self.total)

    def piece(self, name: Any, mid: int) -> Any:
        """Return the value for one micro-batch, with a graph of its own."""
        if name in self.numbers:
            return self.numbers[name][mid]
        tensor = self.whole[name][0]
        found = self.part(name, mid).detach()
        return found.requires_grad_() if tensor.requires_grad else found

    def join_gradients(self, name: Any, parts: dict[int, torch.Tensor | None]) -> torch.Tensor:
        """Return the gradient of a whole input, from those of the micro-batches."""
        _, kind = self.whole[name]
        found = [parts.get(mid) for mid in range(len(self.sizes))]
        if not isinstance(kind, Shard) or len(found) == 1:
            total, *rest = [part for part in found if part is not None]
            for part in rest:
                total = total + part
            return total
        pieces = [torch.zeros_like(self.part(name, mid)) if part is None else part for mid, part in enumerate(found)]
        return kind.join(pieces)
