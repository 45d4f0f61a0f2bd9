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
from gemini.snapshot.model_state import ModelSnapshot


def _raise(value: float) -> float:
    return 5 * value + (3 if value >= 0 else -3)


def _lower(value: float) -> float:
    return type(value)(value / 3)


class _DisguisingTracer(Tracer):
    """A tracer whose traced numbers show other values to C code."""

    def __init__(self, model: nn.Module, leaf_policy: LeafPolicy, disguise: Callable[[float], float]) -> None:
        super().__init__(model, leaf_policy)
        self.disguise = disguise

    def on_hash(self) -> None:
        """Refuse a table of sizes: that a size is missing in it leaves no guard."""
        # The keys of memoized functions are no branch: these are traced as if they had no results yet.
        if self.active and self.recording and not self.busy and not self.caches:
            self.refuse("its Python code looks a size up")


def find_hidden_size_read(graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how a call of the captured branch depends on sizes without a guard; '' where it does not."""
    saved = ModelSnapshot(model, watch=True)
    call = ModelCall(args, kwargs)
    traces: list[Trace] = []
    try:
        with saved.watch_writes():
            subject = CaptureSubject(model, call, saved, find_caches(model))
            for disguise in (_raise, _lower):
                policy = LeafPolicy(blocks=dict(graph.blocks), call_reasons=dict(graph.calls))
                make = partial(_DisguisingTracer, disguise=disguise)
                traces.append(trace(subject, call.tensors, policy, make=make))
                traces[-1].release()
    except (TraceRefused, Exception) as error:
        return str(error) or type(error).__name__
    finally:
        saved.restore()
    if mismatch := first_mismatch(*traces):
        return f"{mismatch[0].name}: {mismatch[1]}"
    one, other = ({(str(guard.expr), repr(guard.expected)) for guard in each.tracer.guards.values()} for each in traces)
    return "" if one == other else f"branches: {', '.join(text for text, _ in sorted(one ^ other))}"
