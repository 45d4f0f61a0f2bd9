"""Classes of equal nodes, and what is found out about them before any of it is timed.

survey    one walk: work and memory of the first node of every class
look      the same without keeping watch over parameters, for classes that a meta walk cannot count
count     one meta walk, for classes that do not fit or cannot run
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.ir.node import Node
from gemini.profiling.flop_count import Work
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import Walk
from gemini.profiling.measured_device import Device, is_out_of_memory
from gemini.profiling.meta_run import MetaWalk, count
from gemini.profiling.node_memory import NodeMemory
from gemini.profiling.node_runner import Isolation, examine
from gemini.profiling.preserved_model import Unchanged

PER_PASS = 6  # nodes of a class that a pass over single nodes times


@dataclass(eq=False)
class NodeClass:
    """Equal nodes, and what is known about them so far."""

    signature: str
    members: list[int] = field(default_factory=list)
    memory: NodeMemory = field(default_factory=NodeMemory)
    forward_work: Work = field(default_factory=Work)
    backward_work: Work = field(default_factory=Work)
    counted: bool = False  # whether work and memory are known
    failure: str = ""  # why it cannot be measured
    guess: str = ""  # why even its work is known by sizes only
    writes: bool = False  # it writes its own parameters

    def due(self, turn: int) -> set[int]:
        """The members to be timed in a pass over single nodes: not the same ones each time where there are many."""
        step = max(1, len(self.members) // PER_PASS)
        return set(self.members[turn % step :: step][:PER_PASS])


class Survey:
    """Finds out the work and memory of classes."""

    def __init__(self, flow: GradientFlow, classes: list[NodeClass], state: Unchanged) -> None:
        self.flow, self.classes, self.state = flow, classes, state
        self.of = {member: found for found in classes for member in found.members}

    def count(self, walk: MetaWalk) -> None:
        """Count the work of classes that were not measured, and their memory as far as that follows from sizes."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is not None and node.id == found.members[0] and (found.failure or not found.counted):
                found.memory, found.forward_work, found.backward_work, found.guess = count(walk, node, self.flow)

        walk.visit(visit)

    def look(self, walk: Walk, device: Device) -> None:
        """Count the work and memory of classes on real values."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is not None and node.id == found.members[0]:
                self._guarded(walk, node, device, found)
                found.guess = found.guess if found.failure else ""

        walk.visit(visit)

    def survey(self, walk: Walk, device: Device) -> None:
        """Examine the first node of every class; see which classes write their own parameters."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is None or found.failure:
                return
            first = node.id == found.members[0]
            kept = self.state.keep(self.flow.held[node.id]) if first or found.writes else []
            if not first:
                self.state.hold(kept)
                return
            self._guarded(walk, node, device, found)
            found.writes = self.state.check(kept)

        walk.visit(visit)

    def _guarded(self, walk: Walk, node: Node, device: Device, found: NodeClass) -> None:
        """A node that does not fit, or cannot run alone, is marked; profiling goes on."""
        if walk.lacks_input(node):
            found.failure = "an input of it did not fit in memory"
            return
        try:
            isolation = Isolation(walk, node, self.flow)
            with walk.place(node), device.watch() as watch:
                found.memory, found.forward_work, found.backward_work = examine(
                    isolation, watch, self.flow.held[node.id]
                )
            found.counted = True
        except Exception as error:
            found.failure = failure_of(error)
            if is_out_of_memory(error):
                device.release()


def failure_of(error: Exception) -> str:
    """Why a node could not be measured."""
    if is_out_of_memory(error):
        return "out of memory"
    text = str(error).splitlines()
    return f"cannot run alone: {type(error).__name__}: {text[0] if text else ''}"
