"""Trace comparison: one trace of a call, and the comparison of two traces.

Two traces of one model at different batch sizes must have the same nodes with the same arguments: sizes are
expressions, so only a constant can differ. The differing result sizes then show the batch dimension of every value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.memoized import clear_caches
from gemini.capture.module_hooks import run_with_hooks
from gemini.capture.python_state import glue_modules
from gemini.capture.rng_use import find_rng_functions
from gemini.capture.scaling_reads import ScalingReadWatcher
from gemini.capture.trace_state import USES_HOST_RNG, TraceRefused
from gemini.capture.tracer import Tracer
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.node import MODULES, Node, TensorMeta
from gemini.ir.pytree import Literal, Number, leaves
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import seed_all


@dataclass
class CaptureSubject:
    """The model to capture, a call of it, its state before, and its memoized functions."""

    model: nn.Module
    call: ModelCall
    saved: ModelSnapshot
    caches: list[Any]


class Trace:
    """A finished trace with its output."""

    def __init__(self, tracer: Tracer, output: Any, arguments: tuple[Any, Any], seconds: float) -> None:
        self.tracer, self.output, self.arguments, self.seconds = tracer, output, arguments, seconds
        self.nodes = tracer.nodes

    def release(self) -> None:
        """Release all tensors; the nodes remain."""
        self.output, self.arguments = None, ((), {})
        self.tracer.release()


def trace(
    subject: CaptureSubject,
    inputs: Sequence[torch.Tensor],
    leaf_policy: LeafPolicy,
    seed: int | None = None,
    *,
    keep: bool = False,
    scaling_reads: ScalingReadWatcher | None = None,
    random_scalars: dict[int, torch.Tensor] | None = None,
    make: Callable[..., Tracer] = Tracer,
) -> Trace:
    """Trace one call, from the saved generators or from a seed; with `keep`, retain all results.

    `random_scalars`: random numbers to force, by node.

    Raises TraceRefused, or the model's own error where it fails without tracing too.
    """
    model, call, saved, caches = subject.model, subject.call, subject.saved, subject.caches
    saved.restore()
    clear_caches(caches)
    args, kwargs = call.arguments(inputs)
    if seed is not None:
        seed_all(seed)
    tracer = make(model, leaf_policy)
    tracer.values, tracer.scaling_reads, tracer.forced_scalars = (
        [] if keep else None,
        scaling_reads,
        random_scalars or {},
    )
    tracer.caches = tuple(caches)
    begin = time.perf_counter()
    try:
        output = run_with_hooks(model, args, kwargs, lambda forward, a, k: _run_traced(tracer, forward, a, k))
    except TraceRefused as found:
        if found.reason == USES_HOST_RNG:
            saved.restore()
            found.calls = find_rng_functions(lambda: model(*args, **kwargs))
        raise
    except Exception as error:
        _rerun_eagerly(model, call, inputs, saved)
        reason = f"tracing it raised {type(error).__name__}: {error!s:.120}"
        raise TraceRefused(tracer.failed or ("",), reason, "") from error
    finally:
        clear_caches(caches)
    seconds = time.perf_counter() - begin
    _refuse_state(model, tracer, saved)
    return Trace(tracer, output, (args, kwargs), seconds)


def _run_traced(tracer: Tracer, forward: Any, args: Any, kwargs: Any) -> Any:
    model = tracer.model
    if forward is model:
        return tracer.run(bind(model, args, kwargs), lambda: model(*args, **kwargs))
    return tracer.run(bind(model, args, kwargs), lambda: tracer.forward_only(forward, args, kwargs))


def _refuse_state(model: nn.Module, tracer: Tracer, saved: ModelSnapshot) -> None:
    """Raise TraceRefused for open modules whose Python changed attributes, which a graph would not repeat."""
    whole = {node.target for node in tracer.nodes if node.kind in MODULES}
    open_names = set(glue_modules(model, whole))
    for name, changed in saved.attributes.find_changes().items():
        attributes = [key for key in changed if (name, key) not in tracer.assigned]
        if name in open_names and attributes:
            scope = next((node.scope for node in tracer.nodes if name in node.scope), ("",))
            scope = scope[: scope.index(name) + 1] if name in scope else ("",)
            raise TraceRefused(
                scope, f"its Python code changes the attribute {attributes[0]!r} of {name or 'the model'}", ""
            )


def _rerun_eagerly(model: nn.Module, call: ModelCall, inputs: Sequence[torch.Tensor], saved: ModelSnapshot) -> None:
    """Raise the model's own error, if it has one."""
    saved.restore()
    args, kwargs = call.arguments(inputs)
    try:
        model(*args, **kwargs)
    finally:
        saved.restore()


def takes_other_branch(a: Trace, b: Trace) -> bool:
    """Return whether contents or random numbers, not sizes, separate two traces: a guard on data differs."""
    outcomes = {str(guard.expr): guard.expected for guard in b.tracer.guards.values() if guard.data}
    return any(
        guard.data and outcomes.get(str(guard.expr), guard.expected) != guard.expected
        for guard in a.tracer.guards.values()
    )


def first_mismatch(a: Trace, b: Trace) -> tuple[Node, str] | None:
    """Return the first node in which two traces differ, and a description."""
    for one, two in zip(a.nodes, b.nodes, strict=False):
        for field in ("kind", "target", "region", "out_spec", "checkpoint", "mutates", "args", "kwargs"):
            left, right = getattr(one, field), getattr(two, field)
            if not _same(left, right):
                return _owner(a, one), f"its {field} depend on the batch size: {_first_difference(left, right)}"
    if len(a.nodes) != len(b.nodes):
        return _owner(
            a, a.nodes[min(len(a.nodes), len(b.nodes)) - 1]
        ), "the number of its steps depends on the batch size"
    if not _same(a.tracer.result, b.tracer.result):
        return a.nodes[-1], "the output depends on the batch size"
    return None


def _owner(trace_: Trace, node: Node) -> Node:
    """Return the node, or the first computing node after a source."""
    return next((later for later in trace_.nodes[node.id :] if not later.is_source), node)


def _first_difference(left: Any, right: Any) -> str:
    """Return a short description of where two fields of a node differ."""
    for one, two in zip(leaves(left), leaves(right), strict=False):
        if not _same(one, two):
            return f"{_brief(one)} and {_brief(two)}"
    return f"{left!s:.40} and {right!s:.40}"


def _brief(leaf: Any) -> str:
    shown = leaf.value if isinstance(leaf, Literal) else leaf.expr if isinstance(leaf, Number) else leaf
    return f"{shown!s:.40}"


def _same(left: Any, right: Any) -> bool:
    try:
        if left == right:
            return True
    except (ValueError, RuntimeError):  # arrays compare by element
        pass
    return repr(left) == repr(right)


def mark_batch_dims(nodes: Sequence[Node], others: Sequence[Node], size: int, other_size: int) -> None:
    """Write the batch dimension into every output of `nodes`, which ran `size` samples; `others` ran another number."""
    for node, other in zip(nodes, others, strict=True):
        for key, meta in node.outputs.items():
            if key in other.outputs:
                node.outputs[key] = _mark_batch_dim(meta, other.outputs[key].shape, size, other_size)


def _mark_batch_dim(meta: TensorMeta, other: tuple[int, ...], size: int, other_size: int) -> TensorMeta:
    if len(other) != len(meta.shape):
        return replace(meta, batch_factor=0)
    dims = [dim for dim, (a, b) in enumerate(zip(meta.shape, other, strict=True)) if a != b]
    if not dims:
        return meta
    a, b = meta.shape[dims[0]], other[dims[0]]
    if len(dims) > 1 or a % size or b % other_size or a // size != b // other_size:
        return replace(meta, batch_factor=0)
    return replace(meta, batch_dim=dims[0], batch_factor=a // size)
