"""Gradient notes: what a script differentiates, recorded while `tf.gradients` runs as usual.

Every optimizer, and every step written by hand, passes through one function of TensorFlow. Its arguments and results
are all that the engine needs to know of a training step: the losses, the variables, and the tensors that the rest of
the graph takes as gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

_NOTES = "_gemini_gradient_notes"


@dataclass(frozen=True, eq=False)
class GradientNote:
    """One call: gradients of `losses` with respect to `sources` (handles of variables, or tensors)."""

    losses: tuple[Any, ...]
    sources: tuple[Any, ...]
    gradients: tuple[Any, ...]  # Tensor, IndexedSlices or None
    arguments: dict[str, Any]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors of all gradients."""
        return tuple(tensor for gradient in self.gradients for tensor in components(gradient))


def components(gradient: Any) -> tuple[Any, ...]:
    """Return the tensors of a gradient: none, one, or the rows and their indices."""
    if gradient is None:
        return ()
    return (gradient.values, gradient.indices) if hasattr(gradient, "indices") else (gradient,)


def notes_of(graph: Any) -> list[GradientNote]:
    """Return the notes of a graph, oldest first."""
    found: list[GradientNote] | None = getattr(graph, _NOTES, None)
    if found is None:
        found = []
        setattr(graph, _NOTES, found)
    return found


def noting(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return TensorFlow's function that computes gradients, which from now on leaves notes on graphs of sessions."""

    @wraps(compute)
    def noted(ys: Any, xs: Any, *more: Any, **named: Any) -> Any:
        result = compute(ys, xs, *more, **named)
        _note(ys, xs, result, _arguments(compute, more, named))
        return result

    return noted


def _arguments(compute: Callable[..., Any], more: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    from inspect import signature

    names = list(signature(compute).parameters)[2:]
    kept = ("grad_ys", "stop_gradients", "unconnected_gradients")
    given = dict(zip(names, more)) | named
    return {name: value for name, value in given.items() if name in kept and value is not None}


def _note(ys: Any, xs: Any, result: Any, arguments: dict[str, Any]) -> None:
    from tensorflow.python.framework.func_graph import FuncGraph

    losses = tuple(ys) if isinstance(ys, (list, tuple)) else (ys,)
    sources = tuple(getattr(x, "handle", x) for x in (xs if isinstance(xs, (list, tuple)) else (xs,)))
    graphs = {getattr(one, "graph", None) for one in (*losses, *sources)}
    if len(graphs) != 1 or any(not hasattr(one, "op") for one in (*losses, *sources)):
        return
    (graph,) = graphs
    if graph is None or isinstance(graph, FuncGraph):
        return
    notes_of(graph).append(GradientNote(losses, sources, tuple(result), arguments))
