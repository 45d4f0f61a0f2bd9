"""Steps: what a stage does, in order: run a node, check a guard, read a number for another stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gemini.codegen.def_use import Reads, tensor_reads
from gemini.codegen.stage_interface import Interface, Port
from gemini.ir.callables import Closure, Method, Partial
from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node
from gemini.ir.pytree import Mapping, Number, Owned, Record, Ref, Sequence, Slice, leaves, refs
from gemini.ir.symint import Expr


@dataclass(frozen=True, eq=False)
class Step:
    """One of: a node to run, a guard to check, a number to read for another stage."""

    node: Node | None = None
    guard: Guard | None = None
    port: Port | None = None
    number: Expr | None = None  # what is read for the port

    @property
    def forms(self) -> tuple[Any, ...]:
        """What it reads, as forms."""
        if self.node is not None:
            return self.node.args, self.node.kwargs
        if self.guard is not None:
            return (Number(self.guard.expr),)
        return () if self.number is None else (Number(self.number),)

    def tensors(self) -> Iterator[Ref]:
        """The tensors it reads as such, every occurrence, in the order in which they are evaluated."""
        for form in self.forms:
            yield from (leaf for leaf in leaves(form) if isinstance(leaf, Ref))

    def reads(self) -> Iterator[Expr]:
        """What it reads from tensors as numbers."""
        for form in self.forms:
            for leaf in leaves(form):
                if isinstance(leaf, Number):
                    yield from tensor_reads(leaf.expr)

    def rewritten(self, change: Callable[[Any], Any]) -> Step:
        """The step with other references."""
        if self.node is not None:
            args, kwargs = rewritten(self.node.args, change), rewritten(self.node.kwargs, change)
            return Step(replace(self.node, args=args, kwargs=kwargs))
        if self.guard is not None:
            return Step(guard=replace(self.guard, expr=rewritten(self.guard.expr, change)))
        return Step(port=self.port, number=rewritten(self.number, change))


def stage_steps(graph: Graph, reads: list[Reads], interface: Interface) -> list[Step]:
    """The steps of a stage, in the order of capture."""
    events: list[tuple[int, int, Step]] = []
    stage = interface.stage
    events += [(index, 2, Step(graph.nodes[index])) for index in reads[stage].nodes]
    events += [(guard.position, 0, Step(guard=guard)) for guard in reads[stage].guards]
    for port in interface.outputs:
        if isinstance(port.value, Expr):
            wanted = [reads[target].numbers[port.value] for target in port.targets]
            events.append((min(wanted, default=len(graph.nodes)), 1, Step(port=port, number=port.value)))
    return [step for _, _, step in sorted(events, key=lambda event: event[:2])]


def rewritten(form: Any, change: Callable[[Any], Any]) -> Any:
    """A form with other references, to tensors (`Ref`) and objects of the model (`Owned`)."""
    if isinstance(form, (Ref, Owned)):
        return change(form)
    if isinstance(form, Number):
        return Number(rewritten(form.expr, change))
    if isinstance(form, Expr):
        return Expr(form.op, tuple(rewritten(part, change) for part in form.operands))
    if isinstance(form, Sequence):
        return replace(form, items=tuple(rewritten(part, change) for part in form.items))
    if isinstance(form, Mapping):
        return replace(form, items=_pairs(form.items, change), state=_pairs(form.state, change))
    if isinstance(form, Record):
        return replace(form, state=_pairs(form.state, change))
    if isinstance(form, Slice):
        return Slice(*(rewritten(part, change) for part in (form.start, form.stop, form.step)))
    if isinstance(form, Closure):
        return replace(form, cells=_all(form.cells, change), defaults=_all(form.defaults, change))
    if isinstance(form, Partial):
        function = rewritten(form.function, change)
        return Partial(function, _all(form.args, change), _pairs(form.kwargs, change))
    return Method(rewritten(form.owner, change), form.name) if isinstance(form, Method) else form


def _all(forms: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(rewritten(part, change) for part in forms)


def _pairs(pairs: tuple[tuple[Any, Any], ...], change: Callable[[Any], Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((key, rewritten(part, change)) for key, part in pairs)


def read_refs(step: Step) -> Iterator[Ref]:
    """All tensors that a step reads, as such or as numbers."""
    for form in step.forms:
        yield from refs(form)
