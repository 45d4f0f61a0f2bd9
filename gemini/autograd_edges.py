"""Edges of autograd's graph: places where a gradient arrives, kept without the tensor they were made of.

The engine owns functions that are written in Python: what Python holds of one does not keep it alive once nothing else
leads to it, and to ask for a gradient there is then to read freed memory. An edge of ours brings a function with it
that keeps the place alive. Later versions of torch do so themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

_OWNS = "ownership_token" in GradientEdge._fields


class OwnedEdge(GradientEdge):  # type: ignore[misc]
    """An edge that keeps the graph behind it alive."""

    owner: Any = None


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Where the gradient of a tensor arrives."""
    edge = get_gradient_edge(tensor)
    if _OWNS or not isinstance(edge.node, torch._C._FunctionBase):
        return edge
    owned = OwnedEdge(*edge)
    with torch.enable_grad():
        owned.owner = tensor.view_as(tensor).grad_fn
    return owned
