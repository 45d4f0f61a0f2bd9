"""Scaling reads: numbers that Python reads from contents and that depend on the number of samples.

`grid.tolist()` has one row per picture, `counts.sum()` counts all patches: a graph with such numbers holds for one
number of samples. Where the model's Python reads them in a function of inputs alone (positions of patches, no
weights), that function becomes opaque: in later runs its Python reads the current numbers.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gemini.capture.concretize import expr_data_refs
from gemini.capture.source_location import call_candidates, is_model_code
from gemini.ir.encode import tensors

if TYPE_CHECKING:
    from gemini.capture.trace_diff import Trace
    from gemini.capture.trace_state import TraceState

READS_SAMPLE_COUNTS = "its Python code reads numbers that count samples"


def find_scaling_lines(one: Trace, other: Trace) -> frozenset[str]:
    """Return the lines at which a trace of more or fewer samples reads other numbers from contents."""
    read: list[dict[str, set[str]]] = []
    for trace in (one, other):
        found: dict[str, set[str]] = {}
        for guard in trace.tracer.guards.values():
            if guard.data and not isinstance(guard.expected, bool):
                found.setdefault(guard.line, set()).add(repr(guard.expected))
        read.append(found)
    return frozenset(line for line in read[0].keys() & read[1].keys() if read[0][line] != read[1][line])


class ScalingReadWatcher:
    """Watches a trace for reads at some lines, and finds the functions around one that may become opaque."""

    def __init__(self, lines: frozenset[str]) -> None:
        self.lines = lines
        self.busy: list[FrameType] = []  # functions with results that depend on weights; held, so that ids stay unique

    def on_append(self, from_weights: bool) -> None:
        """Record a node; `from_weights`: it depends on weights."""
        frame: FrameType | None = sys._getframe(1) if from_weights else None
        while frame is not None:
            if is_model_code(frame) and frame not in self.busy:
                self.busy.append(frame)
            frame = frame.f_back

    def find_calls(self, state: TraceState, expr: Any, line: str) -> tuple[str, ...]:
        """Return the running functions of inputs alone at a read of contents, innermost first."""
        if line not in self.lines or _is_random(state, expr):
            return ()
        name = state.scope[-1] if state.scope else ""
        module = state.model.get_submodule(name) if name else state.model
        found = call_candidates(module, lambda frame: frame not in self.busy and not _takes_weights(state, frame))
        tried = {*state.leaf_policy.released, *state.leaf_policy.call_reasons}
        return tuple(call for call in found if call not in tried)


def _takes_weights(state: TraceState, frame: FrameType) -> bool:
    """Return whether an argument of a function depends on weights."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    inputs = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    held = [value for value in inputs if isinstance(value, (torch.Tensor, list, tuple, dict))]
    known = [state.known.get(tensor) for _, tensor in tensors(held)]
    return any(ref is not None and state.from_weights[ref.node] for ref in known)


def _is_random(state: TraceState, expr: Any) -> bool:
    """Return whether a read depends on random numbers."""
    waiting, seen = [ref.node for ref in expr_data_refs(expr, state.dynamic)], set()
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        if state.nodes[index].random:
            return True
        waiting += [ref.node for ref in state.nodes[index].inputs()]
    return False
