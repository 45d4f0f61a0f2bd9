"""Hidden size reads: sizes that reach the model's Python as plain numbers without a guard.

C code reads the number inside a traced one and bypasses its methods: `layers[:t // 10]`, `0.1 * t`, `math.log2(t)`,
`f"{t}"`. The results are constants of the graph, which may be equal at several lengths and differ at the next. Two
traces of one call show such reads: C code sees a larger number than the size in one, and a smaller one in the other.

    layers[:t // 10]    t = 24: 2 layers    raised: 4 layers    lowered: none
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.memoized import find_caches
from gemini.capture.trace_diff import CaptureSubject, Trace, first_mismatch, trace
from gemini.capture.trace_state import TraceRefused
from gemini.capture.tracer import Tracer
from gemini.ir.call_binding import ModelCall
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.ir.symint import Expr
from gemini.snapshot.model_state import ModelSnapshot

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def trace_again(graph: Graph, model: nn.Module, call: _Call, make: Callable[..., Tracer] = Tracer) -> Trace:
    """Trace a further call of a captured model, with the opaque regions of its graph; no tensors are retained.

    Raises TraceRefused, or the model's own error.
    """
    saved, subject_call = ModelSnapshot(model, watch=True), ModelCall(*call)
    policy = LeafPolicy(blocks=dict(graph.blocks), call_reasons=dict(graph.calls))
    policy.opens_leaves = graph.settings.get("opens_leaves", False)
    try:
        with saved.watch_writes():
            subject = CaptureSubject(model, subject_call, saved, find_caches(model))
            found = trace(subject, subject_call.tensors, policy, make=make)
    finally:
        saved.restore()
    found.release()
    return found


def find_hidden_size_read(graph: Graph, model: nn.Module, call: _Call, *, of_samples: bool = False) -> str:
    """Return how a call of the captured branch depends on sizes without a guard; '' where it does not.

    `of_samples`: only on sizes that count samples.
    """
    concerns = partial(_counts_samples, graph) if of_samples else _concerns_all
    try:
        one, other = (
            trace_again(graph, model, call, partial(_DisguisingTracer, disguise=disguise, concerns=concerns))
            for disguise in (_raise, _lower)
        )
    except (TraceRefused, Exception) as error:
        return str(error) or type(error).__name__
    if mismatch := first_mismatch(one, other):
        return f"{mismatch[0].name}: {mismatch[1]}"
    differing = guard_facts(one.tracer.guards.values()) ^ guard_facts(other.tracer.guards.values())
    return f"branches: {', '.join(sorted(text for text, _ in differing))}" if differing else ""


def _concerns_all(_: Expr) -> bool:
    return True


def _counts_samples(graph: Graph, expr: Expr) -> bool:
    """Return whether an expression reads the number of samples."""
    for operand in expr.operands:
        if isinstance(operand, Expr):
            if _counts_samples(graph, operand):
                return True
        elif isinstance(operand, Ref) and operand.node < len(graph.nodes):
            made = graph.nodes[operand.node].outputs.get((operand.source, operand.path))
            if made is None or made.batch_factor == 0:
                return True
            is_other = expr.op == "size" and expr.operands[1] % len(made.shape) != made.batch_dim
            if made.batch_dim is not None and not is_other:
                return True
    return False


def guard_facts(guards: Any) -> set[tuple[str, str]]:
    """Return guards in a comparable form."""
    return {(str(guard.expr), repr(guard.expected)) for guard in guards}


class _DisguisingTracer(Tracer):
    """A tracer whose traced numbers show other values to C code."""

    def __init__(
        self,
        model: nn.Module,
        leaf_policy: LeafPolicy,
        disguise: Callable[[float], float],
        concerns: Callable[[Expr], bool],
    ) -> None:
        super().__init__(model, leaf_policy)
        self.disguise = lambda value, expr: disguise(value) if concerns(expr) else value
        self._concerns = concerns

    def on_hash(self, expr: Expr) -> None:
        """Refuse a table of sizes: that a size is missing in it leaves no guard."""
        # The keys of memoized functions are no branch: these are traced as if they had no results yet.
        if self.active and self.recording and not self.busy and not self.caches and self._concerns(expr):
            self.refuse("its Python code looks a size up")


def _raise(value: float) -> float:
    return 5 * value + (3 if value >= 0 else -3)


def _lower(value: float) -> float:
    return type(value)(value / 3)
