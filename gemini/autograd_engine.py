"""Autograd engine: backward without the checks of `torch.autograd.backward` and `grad`, gradient edges, node names.

Given gradients, torch compares their shapes with code for symbolic sizes. Loading that code takes seconds per process,
since it imports a library of symbolic mathematics, and the workers of a pipeline would load it one after the other in
the first step. The engine itself checks shapes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

_NODE_MODULE = "builtins"  # of torch's own nodes
Found = tuple[torch.Tensor | None, ...]
_OWNS = "ownership_token" in GradientEdge._fields


def accumulate(roots: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """Run backward from roots, which are tensors or edges, into `.grad`, as `torch.autograd.backward`."""
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), True, accumulate_grad=True)


def differentiate(
    roots: Sequence[Any], gradients: Sequence[torch.Tensor], ends: Sequence[Any], retain_graph: bool = False
) -> Found:
    """Return gradients of the ends, as `torch.autograd.grad`; None where there is none.

    With `retain_graph` also through reentrant checkpoints, which do not support gradients of selected tensors.
    """
    try:
        return _between(roots, gradients, ends, retain_graph)
    except RuntimeError:
        if not retain_graph or not all(isinstance(end, torch.Tensor) and end.is_leaf for end in ends):
            raise
        if not _has_reentrant(roots):
            raise
    return _into_leaves(roots, gradients, ends)


def _between(roots: Sequence[Any], gradients: Sequence[torch.Tensor], ends: Sequence[Any], retain_graph: bool) -> Found:
    found: Found = _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def _has_reentrant(roots: Sequence[Any]) -> bool:
    """Return whether these tensors depend on a checkpoint that runs its own backward, into all leaves."""
    from torch.utils.checkpoint import CheckpointFunction

    nodes = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "_forward_cls", None) is CheckpointFunction:
            return True
        seen.add(node)
        nodes += [behind for behind, _ in node.next_functions]
    return False


def _into_leaves(roots: Sequence[Any], gradients: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> Found:
    """Compute gradients through `.grad`, and restore it."""
    before = [end.grad for end in ends]
    try:
        for end in ends:
            end.grad = None
        _engine_run_backward(tuple(roots), tuple(gradients), True, False, (), True, accumulate_grad=True)
        return tuple(end.grad for end in ends)
    finally:
        for end, gradient in zip(ends, before, strict=True):
            end.grad = gradient


class OwnedEdge(GradientEdge):  # type: ignore[misc]
    """An edge that keeps the graph behind it alive.

    The engine owns functions written in Python: a Python reference does not keep one alive once nothing else leads to
    it, and requesting its gradient would read freed memory. Later versions of torch have owning edges.
    """

    owner: Any = None


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a tensor arrives, without the tensor."""
    edge = get_gradient_edge(tensor)
    if _OWNS or not isinstance(edge.node, torch._C._FunctionBase):
        return edge
    owned = OwnedEdge(*edge)
    with torch.enable_grad():
        owned.owner = tensor.view_as(tensor).grad_fn
    return owned


def grad_fn_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's grad_fn as torch prints it; '' if it has none, or an unnamed one of Gemini."""
    node = tensor.grad_fn
    if node is None:
        return ""
    kind: Any = type(node)
    if kind.__name__ == "CppFunction":  # of an extension
        return str(node.name()).rpartition("::")[2]
    made_by = getattr(kind, "_forward_cls", None)
    is_ours = made_by is not None and made_by.__module__.startswith("gemini.")
    return "" if is_ours and kind.__module__ != _NODE_MODULE else str(kind.__name__)


@cache
def rename_grad_fn(function: type[torch.autograd.Function], name: str) -> type[torch.autograd.Function]:
    """Return the function with another node name: results print as on one device (`grad_fn=<NllLossBackward0>`)."""
    if not name:
        return function
    made: Any = type(function.__name__, (function,), {"__module__": function.__module__})
    node = made._backward_cls
    node.__name__ = node.__qualname__ = name
    node.__module__ = _NODE_MODULE
    return made  # type: ignore[no-any-return]
