"""Backward by autograd's engine, without what `torch.autograd.backward` and `grad` do before they call it.

Given gradients, torch compares their shapes with code for symbolic sizes, and to load that code takes seconds in every
process, for a library of symbolic mathematics comes with it: in the first step of a pipeline one worker after the other
would load it. The engine itself looks at shapes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

_NODE_MODULE = "builtins"  # of torch's own nodes, which have none
Found = tuple[torch.Tensor | None, ...]
_OWNS = "ownership_token" in GradientEdge._fields


def accumulate(roots: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
    """Backward from roots, which are tensors or edges, into `.grad`, as `torch.autograd.backward`."""
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, (), True, accumulate_grad=True)


def differentiate(
    roots: Sequence[Any], gradients: Sequence[torch.Tensor], ends: Sequence[Any], retain_graph: bool = False
) -> Found:
    """Gradients of the ends, as `torch.autograd.grad`; None where there is none.

    Where `retain_graph`, also through reentrant checkpoints: these refuse to be asked for gradients of some tensors.
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
    """Whether a checkpoint is behind these tensors that runs a backward of its own, into all leaves."""
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
    """By way of `.grad`, which is afterwards what it was."""
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


def grad_fn_name(tensor: torch.Tensor) -> str:
    """The name of what has made a tensor, as torch prints it; '' where nothing has, or a node of ours without one."""
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
    """The function, whose nodes go by another name."""
    if not name:
        return function
    made: Any = type(function.__name__, (function,), {"__module__": function.__module__})
    node = made._backward_cls
    node.__name__ = node.__qualname__ = name
    node.__module__ = _NODE_MODULE
    return made  # type: ignore[no-any-return]
