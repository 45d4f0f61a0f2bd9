"""Inputs of a step in a worker: whole tensors of which every micro-batch gets its slice, and numbers."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch


class Inputs:
    """What came with the call, by port, or with the tape, by number of the value."""

    def __init__(
        self, whole: list[tuple[Any, int | None, int]], numbers: list[Any], tensors: list[Any], sizes: tuple[int, ...]
    ) -> None:
        self.whole = {name: (tensors[at], dim) for name, dim, at in whole}
        self.numbers = dict(numbers)
        self.sizes, self.total = sizes, sum(sizes)
        self.starts = [0, *accumulate(sizes)]

    def piece(self, name: Any, mid: int) -> Any:
        """The value for one micro-batch; a slice where its dimension counts samples."""
        if name in self.numbers:
            return self.numbers[name][mid]
        tensor, dim = self.whole[name]
        if dim is None or len(self.sizes) == 1:
            return tensor
        factor = tensor.shape[dim] // self.total
        part = tensor.detach().narrow(dim, self.starts[mid] * factor, self.sizes[mid] * factor)
        return part.requires_grad_() if tensor.requires_grad else part

    def gathered(self, name: Any, parts: dict[int, torch.Tensor | None]) -> torch.Tensor:
        """The gradient of a whole input, from those of the micro-batches."""
        tensor, dim = self.whole[name]
        found = [parts.get(mid) for mid in range(len(self.sizes))]
        if dim is None:
            return _sum([part for part in found if part is not None])
        factor = tensor.shape[dim] // self.total
        pieces = []
        for size, part in zip(self.sizes, found, strict=True):
            shape = (*tensor.shape[:dim], size * factor, *tensor.shape[dim + 1 :])
            pieces.append(part if part is not None else torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
