"""Micro-batch split: which dimension of each input counts samples, and the call cut along it.

Sizes are those of `torch.tensor_split`: as even as possible, the larger micro-batches first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.capture.batch_dim import BatchLayout, find_batch_layout
from gemini.capture.graph_guards import early_guards
from gemini.capture.warmup import Warmup
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.graph import Graph
from gemini.planner.preconditions import check_reassigned
from gemini.snapshot.model_state import ModelSnapshot

_MAX_PARTS = 64  # tried for one on the branch of the whole batch


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


def find_part_like_batch(
    graph: Graph,
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    batch: BatchLayout,
    samples: int,
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return samples that take the branch of the whole batch; None where the first ones do, or none are found.

    The first sample may be the longest of a batch, without padding: a model that branches on `mask.all()`. Half of the
    samples must take the branch, too: capture compares them.
    """
    early = early_guards(graph)
    if not early.guards:
        return None
    wanted, half = early.find_broken(model, bind(model, *call)), max(1, samples // 2)
    for start in (0, *range(min(batch.size - samples, _MAX_PARTS), 0, -1)):
        parts = [slice_call(*call, batch, start, samples), slice_call(*call, batch, start + samples - half, half)]
        if all(early.find_broken(model, bind(model, *part)) is wanted for part in parts):
            return parts[0] if start else None
    return None
