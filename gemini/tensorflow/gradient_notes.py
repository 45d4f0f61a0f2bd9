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

from gemini.tensorflow.forward_facts import VARIANT, drawing_region, forward_ops, inner_types
from gemini.tensorflow.rules.registry import RANDOM

_NOTES = "_gemini_gradient_notes"


@dataclass(frozen=True, eq=False)
class GradientNote:
    """One call: gradients of `losses` with respect to `sources` (handles of variables, or tensors)."""

    losses: tuple[Any, ...]
    sources: tuple[Any, ...]
    gradients: tuple[Any, ...]  # Tensor, IndexedSlices or None
    arguments: dict[str, Any]
    inner: tuple[tuple[Any, Any], ...] = ()
    """What loops and branches that draw random numbers return, with the gradients of it."""

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
        losses, sources = (list(one) if isinstance(one, (list, tuple)) else [one] for one in (ys, xs))
        if not _are_of_one_session(losses, sources):
            return compute(ys, xs, *more, **named)
        inner = _results_of_random_functions(losses)
        found = list(compute(ys, [*sources, *inner], *more, **named))
        result, rest = found[: len(sources)], found[len(sources) :]
        handles = tuple(getattr(x, "handle", x) for x in sources)
        given = _arguments(compute, more, named)
        note = GradientNote(tuple(losses), handles, tuple(result), given, tuple(zip(inner, rest, strict=True)))
        notes_of(losses[0].graph).append(note)
        return result

    return noted


def _arguments(compute: Callable[..., Any], more: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    from inspect import signature

    names = list(signature(compute).parameters)[2:]
    kept = ("grad_ys", "stop_gradients", "unconnected_gradients")
    given = dict(zip(names, more)) | named
    return {name: value for name, value in given.items() if name in kept and value is not None}


def _are_of_one_session(losses: list[Any], sources: list[Any]) -> bool:
    """Whether losses and sources are tensors or variables of one graph, which is that of sessions."""
    from tensorflow.python.framework.func_graph import FuncGraph

    given = [*losses, *(getattr(x, "handle", x) for x in sources)]
    graphs = {getattr(one, "graph", None) for one in given}
    return len(graphs) == 1 and all(hasattr(one, "op") for one in given) and not isinstance(given[0].graph, FuncGraph)


def _results_of_random_functions(losses: list[Any]) -> list[Any]:
    """Return what the rest of the forward part reads of loops and branches that draw random numbers."""
    ops = forward_ops(losses, {}) or ()
    called = [op for op in ops if op.type in ("While", "If")]
    if not called:
        return []
    functions = {one.signature.name: one for one in losses[0].graph.as_graph_def().library.function}
    random = {op.name for op in called if RANDOM & {*inner_types(op.node_def, functions)}}
    results = {tensor.name: tensor for op in ops for tensor in op.outputs}
    variants = {name for name, tensor in results.items() if tensor.dtype.as_datatype_enum == VARIANT}
    makers = {name: tensor.op.name for name, tensor in results.items()}
    region = drawing_region([(op.name, [one.name for one in op.inputs]) for op in ops], random, makers, variants)
    read = {tensor.name for op in ops if op.name not in region for tensor in op.inputs}
    return [results[name] for name in read if results[name].dtype.is_floating and makers[name] in region]
