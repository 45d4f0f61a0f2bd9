"""Loops over experts: Python that lists the experts that have rows, and runs each on its rows.

    mask = one_hot(chosen, experts).permute(2, 1, 0)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():        a list: the experts that have rows
        slot, row = torch.where(mask[expert])                 a choice
        if row.numel() == 0: continue
        out.index_add_(0, row, experts[expert](x[row]) * weights[row, slot, None])

The set of experts that run depends on all samples. A sample is not affected if an expert without rows adds nothing.
So the Python is traced as if every expert had rows, and that trace is analysed; then as if some had none, and each of
these traces must equal the first one without the steps of those experts:

    all      e0 e1 e2 e3
    even     e0    e2
    odd         e1    e3
    none

Any other branch on contents is refused, as in any leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Kind
from gemini.batch_analysis.expert_segments import check_is_without, check_lists
from gemini.batch_analysis.leaf_trace import LeafTrace, checked_results
from gemini.batch_analysis.op_call import AnalysisRefused
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.capture import concretize
from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.trace_state import TraceRefused
from gemini.capture.tracer import Tracer
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.ir.symint import Expr

_LENGTH = 2  # rows per choice in a trace
_EMPTY = {("eq", 0), ("ne", 0), ("gt", 0), ("le", 0), ("lt", 1), ("ge", 1)}
Keep = Callable[[int], bool]


def _all(at: int) -> bool:  # noqa: ARG001
    return True


def _even(at: int) -> bool:
    return at % 2 == 0


def _odd(at: int) -> bool:
    return at % 2 == 1


def _none(at: int) -> bool:  # noqa: ARG001
    return False


def analyze_expert_loops(
    node: Node, module: nn.Module, interpreter: KindInterpreter, model: nn.Module | None = None
) -> list[Kind]:
    """Return the kinds of the results of a leaf that loops over experts."""
    leaf = LeafTrace(node, module, interpreter, model)
    try:
        last, traces = 0, leaf.traces(_ExpertTracer)
    except TraceRefused as coarse:
        if IndexError.__name__ not in coarse.reason:
            raise
        last, traces = 1, leaf.traces(partial(_ExpertTracer, last=1))  # the extra class of rows without an expert
    full: Any = traces[0].tracer
    if not full.picks:
        raise AnalysisRefused("it chooses no rows")
    inner = leaf.graph(traces)
    check_lists(inner, full)
    inside = leaf.interpret(inner, frozenset(full.lists))
    found = checked_results(inner, inside)
    for listed, filled in ((_even, _all), (_odd, _all), (_none, _all), (_all, _even), (_all, _odd), (_all, _none)):
        if (listed is _all and full.asked) or (filled is _all and full.lists):
            (less,) = leaf.traces(partial(_ExpertTracer, listed=listed, filled=filled, last=last), 1)
            check_is_without(full, less.tracer)
    return found


@dataclass
class LoopTurn:
    """The steps recorded while the loop body had one element of a list."""

    node: int  # makes the list
    element: int
    start: int
    stop: int = -1


@dataclass
class _ListElements:
    """Iterates over a list and records which element is current."""

    tracer: _ExpertTracer
    node: int
    parts: tuple[torch.Tensor, ...]
    turns: list[LoopTurn] = field(default_factory=list)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for element, part in zip(self.tracer.lists[self.node], self.parts, strict=True):
            turn = LoopTurn(self.node, element, len(self.tracer.nodes))
            self.tracer.turns.append(turn)
            yield part
            turn.stop = len(self.tracer.nodes)


class _ExpertTracer(Tracer):
    """A trace in which lists have prescribed elements, and choices prescribed rows."""

    def __init__(
        self, model: nn.Module, leaf_policy: LeafPolicy, listed: Keep = _all, filled: Keep = _all, last: int = 0
    ) -> None:
        super().__init__(model, leaf_policy)
        self.listed, self.filled, self.last = listed, filled, last
        self.lists: dict[int, list[int]] = {}  # nodes that list experts → the listed ones
        self.parts: dict[int, int] = {}  # nodes that unpack a list → the list
        self.turns: list[LoopTurn] = []
        self.picks: dict[int, int] = {}  # nodes that choose rows → their number
        self.elements: set[int] = set()  # nodes that depend on one element only
        self.parting = False
        self.asked = False  # the Python branched on whether a choice is empty

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        short = concretize.short_name(_name(func))
        if short in concretize.SIZES and short != "__len__":  # with provenance, even where they depend on contents
            dynamic, self.dynamic = self.dynamic, {}
            try:
                return super()._op(func, args, kwargs)
            finally:
                self.dynamic = dynamic
        return super()._op(func, args, kwargs)

    def _record(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        short = concretize.short_name(name)
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        tupled = bool(kwargs.get("as_tuple"))
        if tensor is not None and short == "nonzero" and not tupled and len(args) == 1 and tensor.dim() == 1:
            listed = [at for at in range(tensor.shape[0] - self.last) if self.listed(at)]
            made = torch.tensor(listed, dtype=torch.int64, device=tensor.device).view(-1, 1)
            output = super()._record(lambda *_, **__: made, name, args, kwargs)
            self.lists[len(self.nodes) - 1] = listed
            return output
        if (
            tensor is not None
            and len(args) == 1
            and ((short == "where" and not kwargs) or (short == "nonzero" and tupled))
        ):
            return self._choose_rows(name, tensor, args, kwargs)
        if tensor is not None and short == "unbind" and not tensor.numel() and self.origin(tensor).node in self.lists:
            return ()
        self.parting = short in concretize.PARTS  # its number of parts; its rule refuses to unpack rows
        try:
            output = super()._record(func, name, args, kwargs)
        finally:
            self.parting = False
        return self._note_elements(short, tensor, output)

    def _choose_rows(self, name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        count = _LENGTH if self.filled(len(self.picks)) else 0
        made = tuple(torch.arange(count, device=tensor.device) % max(size, 1) for size in tensor.shape)
        output = super()._record(lambda *_, **__: made, name, args, kwargs)
        self.picks[len(self.nodes) - 1] = count
        return output

    def _note_elements(self, short: str, tensor: torch.Tensor | None, output: Any) -> Any:
        """Record elements of lists and values that depend on one element only."""
        node = self.nodes[-1] if self.nodes else None
        if node is None or tensor is None or node.kind != "op" or node.mutates:
            return output
        of = {ref.node for ref in node.inputs()}
        if short == "unbind" and of <= self.lists.keys() and len(of) == 1:
            self.parts[node.id] = next(iter(of))
            self.elements.add(node.id)
            return _ListElements(self, self.parts[node.id], output)
        if of and of <= self.elements:
            self.elements.add(node.id)
        return output

    def guard(self, expr: Expr, expected: Any, concrete: bool = False) -> None:
        """Record a guard, unless it concerns an element, a list, or a choice that is not empty."""
        if self._is_own(expr) or self.parting:
            return
        if self._asks_emptiness(expr):
            self.asked = True
            return
        super().guard(expr, expected, concrete)

    def _is_own(self, expr: Expr) -> bool:
        if expr.op == "size" and expr.operands[0].node in self.lists:
            return True
        read = list(concretize.expr_data_refs(expr, {}))
        return bool(read) and all(ref.node in self.elements for ref in read) and not _reads_size(expr)

    def _asks_emptiness(self, expr: Expr) -> bool:
        """Return whether an expression tests a choice for emptiness (`row.numel() == 0`)."""
        size = expr.operands[0]
        asked = expr.op == "bool" or (len(expr.operands) > 1 and (expr.op, expr.operands[1]) in _EMPTY)
        if not asked or not isinstance(size, Expr) or size.op not in ("size", "numel"):
            return False
        ref = size.operands[0]
        return isinstance(ref, Ref) and ref.node in self.picks


def _reads_size(expr: Any) -> bool:
    """Return whether an expression reads a size."""
    if not isinstance(expr, Expr):
        return False
    return expr.op in ("size", "numel", "stride", "storage_offset") or any(map(_reads_size, expr.operands))


def _name(func: Any) -> str:
    from gemini.ir.op_targets import op_name

    return op_name(func)
