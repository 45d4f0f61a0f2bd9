"""Stage steps: the work of a stage in order: run a node, check a guard, read a number for another stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gemini.codegen.stage_interface import Interface, Port
from gemini.codegen.stage_reads import Reads
from gemini.ir.def_use import rewrite_refs, tensor_reads
from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node
from gemini.ir.pytree import Number, Ref, leaves, refs
from gemini.ir.symint import Expr


@dataclass(frozen=True, eq=False)
class StageStep:
    """One of: a node to run, a guard to check, a number to read for another stage."""

    node: Node | None = None
    guard: Guard | None = None
    port: Port | None = None
    number: Expr | None = None  # the number of the port

    @property
    def forms(self) -> tuple[Any, ...]:
        """The forms that it reads."""
        if self.node is not None:
            return self.node.args, self.node.kwargs
        if self.guard is not None:
            return (Number(self.guard.expr),)
        return () if self.number is None else (Number(self.number),)

    def tensors(self) -> Iterator[Ref]:
        """Yield the tensors it reads directly, every occurrence, in the order of evaluation."""
        for form in self.forms:
            yield from (leaf for leaf in leaves(form) if isinstance(leaf, Ref))

    def reads(self) -> Iterator[Expr]:
        """Yield the numbers it reads from tensors."""
        for form in self.forms:
            for leaf in leaves(form):
                if isinstance(leaf, Number):
                    yield from tensor_reads(leaf.expr)

    def with_refs(self, change: Callable[[Any], Any]) -> StageStep:
        """Return the step with its references replaced by `change`."""
        if self.node is not None:
            args, kwargs = rewrite_refs(self.node.args, change), rewrite_refs(self.node.kwargs, change)
            return StageStep(replace(self.node, args=args, kwargs=kwargs))
        if self.guard is not None:
            return StageStep(guard=replace(self.guard, expr=rewrite_refs(self.guard.expr, change)))
        return StageStep(port=self.port, number=rewrite_refs(self.number, change))


def stage_steps(graph: Graph, reads: list[Reads], interface: Interface) -> list[StageStep]:
    """Return the steps of a stage, in the order of capture."""
    events: list[tuple[int, int, StageStep]] = []
    stage = interface.stage
    events += [(index, 2, StageStep(graph.nodes[index])) for index in reads[stage].nodes]
    events += [(guard.position, 0, StageStep(guard=guard)) for guard in reads[stage].guards]
    for port in interface.outputs:
        if isinstance(port.value, Expr):
            wanted = [reads[target].numbers[port.value] for target in port.targets]
            events.append((min(wanted, default=len(graph.nodes)), 1, StageStep(port=port, number=port.value)))
    return [step for _, _, step in sorted(events, key=lambda event: event[:2])]


def read_refs(step: StageStep) -> Iterator[Ref]:
    """Yield all tensors that a step reads, directly or as numbers."""
    for form in step.forms:
        yield from refs(form)
