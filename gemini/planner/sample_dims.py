"""Samples: which dimension of each input of a call counts them, found by runs of the model on few of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from gemini.capture.batch_dim import BatchLayout, find_batch_layout
from gemini.capture.warmup import Warmup
from gemini.ir.call_binding import ModelCall
from gemini.planner.step_plan import UnplannableError
from gemini.snapshot.model_state import ModelSnapshot


def find_samples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchLayout | None:
    """The dimensions, and how many samples there are; None where no input counts any. The model is left as it was."""
    saved = ModelSnapshot(model, watch=True)
    try:
        with saved.watching():
            found = find_batch_layout(model, ModelCall(args, kwargs), Warmup(model, saved))
    finally:
        saved.restore()
    check_memory(saved.reassigned)
    return found


def check_memory(reassigned: Collection[str]) -> None:
    """Refuse a forward that gives tensors of the model other memory: in a worker they would leave shared memory."""
    if reassigned:
        raise UnplannableError(f"its forward gives {min(reassigned)} other memory")
