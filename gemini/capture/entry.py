"""The entry: `capture(model, args, kwargs)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.capture.binding import Call
from gemini.capture.granularity import make_granularity
from gemini.capture.graph import Graph
from gemini.capture.refinement import Refinement
from gemini.capture.variants import Variants
from gemini.errors import CaptureError


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    depth: int | None = None,
    basic_blocks: tuple[type | str, ...] = (),
) -> Graph:
    """Capture a model as a graph, on one batch."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"capture needs an nn.Module, got {type(model).__name__}")

    def once(call_args: Any, call_kwargs: Any) -> Graph:
        granularity = make_granularity(model, depth, basic_blocks)
        return Refinement(model, Call(tuple(call_args), dict(call_kwargs)), granularity).capture()

    graph = once(args, kwargs or {})
    graph.variants = Variants(model, once)
    graph.variants.graphs.append(graph)
    return graph
