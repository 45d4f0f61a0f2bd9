"""Micro-batch split: which dimension of each input counts samples, and the call cut along it.

Sizes are those of `torch.tensor_split`: as even as possible, the larger micro-batches first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.capture.batch_dim import BatchLayout, find_batch_layout
from gemini.capture.warmup import Warmup
from gemini.ir.call_binding import ModelCall
from gemini.planner.preconditions import check_reassigned
from gemini.snapshot.model_state import ModelSnapshot


def find_batch_dims(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchLayout | None:
    """Return the sample dimensions and the batch size, found by runs on few samples; None where no input has samples.

    The model is left unchanged.
    """
    saved = ModelSnapshot(model, watch=True)
    try:
        with saved.watch_writes():
            found = find_batch_layout(model, ModelCall(args, kwargs), Warmup(model, saved))
    finally:
        saved.restore()
    check_reassigned(saved.reassigned)
    return found


def micro_batch_sizes(samples: int, count: int) -> list[int]:
    """Return the samples of each of `count` micro-batches; fewer micro-batches where there are fewer samples."""
    count = max(1, min(samples, count))
    small, larger = divmod(samples, count)
    return [small + (at < larger) for at in range(count)]


def slice_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout, start: int, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call for `length` of its samples."""
    call = ModelCall(args, kwargs)
    parts = batch.copy(call.tensors, start, length)
    return call.with_tensors(parts)
