"""The entry: `capture(model, args, kwargs)`."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.capture.batch_dim import opens_leaves
from gemini.capture.call_binding import Call
from gemini.capture.driver import Refinement
from gemini.capture.leaf_policy import make_granularity
from gemini.capture.specialize import Variants
from gemini.errors import CaptureError
from gemini.ir.graph import Graph


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
    names = [block if isinstance(block, str) else block.__name__ for block in _as_tuple(basic_blocks)]
    graph = _capture_once(model, args, kwargs or {}, depth, basic_blocks)
    graph.settings = {"depth": depth, "basic_blocks": names}
    return with_variants(graph, model)


def with_variants(graph: Graph, model: nn.Module) -> Graph:
    """Let a graph capture further variants of its model with the same settings."""
    depth, blocks = graph.settings["depth"], tuple(graph.settings["basic_blocks"])
    graph.variants = Variants(model, lambda args, kwargs: _capture_once(model, args, kwargs, depth, blocks))
    graph.variants.graphs.append(graph)
    return graph


def _capture_once(model: nn.Module, args: Any, kwargs: Any, depth: Any, basic_blocks: Any) -> Graph:
    granularity = make_granularity(model, depth, basic_blocks)
    granularity.opens_leaves = opens_leaves()
    return Refinement(model, Call(tuple(args), dict(kwargs)), granularity).capture()


def _as_tuple(blocks: Any) -> tuple[Any, ...]:
    return (blocks,) if isinstance(blocks, (str, type)) else tuple(blocks)
