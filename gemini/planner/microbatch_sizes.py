"""Pieces: a call of the model cut into micro-batches.

Samples are dealt out as `torch.tensor_split` does: as evenly as possible, the larger pieces first.
"""

from __future__ import annotations

from typing import Any

from gemini.capture.batch_dim import BatchLayout
from gemini.ir.call_binding import ModelCall


def piece_sizes(samples: int, count: int) -> list[int]:
    """How many samples each of `count` micro-batches has; fewer micro-batches where there are fewer samples."""
    count = max(1, min(samples, count))
    small, larger = divmod(samples, count)
    return [small + (at < larger) for at in range(count)]


def part_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout, start: int, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call for some of its samples; `batch` says where each tensor counts them."""
    call = ModelCall(args, kwargs)
    parts = batch.take(call.tensors, start, length)
    return call.with_tensors(parts)
