"""Scaling reads: what Python reads from contents, and is more where there are more samples.

`grid.tolist()` has a row a picture, `counts.sum()` counts all patches: a graph with such numbers in it holds for one
number of samples. Where the model's Python reads them in a function of inputs alone (positions of patches, no weights),
that function is kept whole: in later runs its Python reads what is there then.
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
    """The lines at which a trace of more or fewer samples reads other numbers from contents."""
    read: list[dict[str, set[str]]] = []
    for trace in (one, other):
        found: dict[str, set[str]] = {}
        for guard in trace.tracer.guards.values():
            if guard.data and not isinstance(guard.expected, bool):
                found.setdefault(guard.line, set()).add(repr(guard.expected))
        read.append(found)
    return frozenset(line for line in read[0].keys() & read[1].keys() if read[0][line] != read[1][line])


class ScalingReadWatcher:
    """Watches a trace for reads at some lines, and names the functions around one that may be kept whole."""

    def __init__(self, lines: frozenset[str]) -> None:
        self.lines = lines
        self.busy: list[FrameType] = []  # functions in which something followed from weights; kept, so none is reused

    def appended(self, from_weights: bool) -> None:
        """A node was recorded; `from_weights`: it follows from weights."""
        frame: FrameType | None = sys._getframe(1) if from_weights else None
        while frame is not None:
            if is_model_code(frame) and frame not in self.busy:
                self.busy.append(frame)
            frame = frame.f_back

    def calls(self, recording: TraceState, expr: Any, line: str) -> tuple[str, ...]:
        """The functions of inputs alone that run where contents are read, innermost first."""
        if line not in self.lines or _is_random(recording, expr):
            return ()
        name = recording.scope[-1] if recording.scope else ""
        module = recording.model.get_submodule(name) if name else recording.model
        found = call_candidates(module, lambda frame: frame not in self.busy and not _takes_weights(recording, frame))
        tried = {*recording.leaf_policy.released, *recording.leaf_policy.call_reasons}
        return tuple(call for call in found if call not in tried)


def _takes_weights(recording: TraceState, frame: FrameType) -> bool:
    """Whether a function is given something that follows from weights."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    held = [value for value in given if isinstance(value, (torch.Tensor, list, tuple, dict))]
    known = [recording.known.get(tensor) for _, tensor in tensors(held)]
    return any(ref is not None and recording.from_weights[ref.node] for ref in known)


def _is_random(recording: TraceState, expr: Any) -> bool:
    """Whether what is read follows from random numbers."""
    waiting, seen = [ref.node for ref in expr_data_refs(expr, recording.dynamic)], set()
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        if recording.nodes[index].random:
            return True
        waiting += [ref.node for ref in recording.nodes[index].inputs()]
    return False
