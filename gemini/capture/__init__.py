"""Capture: a PyTorch model as a graph that can be run, partitioned, drawn and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node, TensorMeta

if TYPE_CHECKING:
    from torch import nn

    from gemini.capture.entry import capture

__all__ = ["Graph", "Guard", "Node", "TensorMeta", "capture"]


def _attach_model(graph: Graph, model: nn.Module) -> Graph:
    from gemini.capture.entry import attach_model

    return attach_model(graph, model)


Graph.attach = _attach_model


def __getattr__(name: str) -> Any:
    """Import the tracer on first use: workers need other modules of this package, and never capture."""
    if name != "capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gemini.capture.entry import capture

    globals()[name] = capture
    return capture
