"""Pieces: a call of the model cut into micro-batches.

Samples are dealt out as `torch.tensor_split` does: as evenly as possible, the larger pieces first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemini.capture.binding import Call
from gemini.capture.values import decode


def piece_sizes(samples: int, count: int) -> list[int]:
    """How many samples each of `count` micro-batches has; fewer micro-batches where there are fewer samples."""
    count = max(1, min(samples, count))
    small, larger = divmod(samples, count)
    return [small + (at < larger) for at in range(count)]


def part_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], dims: Sequence[int | None], start: int, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call for some of its samples; `dims` says for each tensor which dimension counts them."""
    call = Call(args, kwargs)
    parts = [
        tensor if dim is None else _leaf(tensor.narrow(dim, start, length), tensor)
        for tensor, dim in zip(call.tensors, dims, strict=True)
    ]
    made, named = decode(call.form, lambda ref: parts[ref.node])
    return made, named


def _leaf(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return part.detach().clone().requires_grad_(tensor.requires_grad)
