"""Node classes: nodes of equal cost, and their work and memory, counted before any node is timed.

survey            one walk: work and memory of the first node of every class
count_on_values   the same without tracking writes to parameters, for classes that a meta walk cannot count
count             one meta walk, for classes that do not fit or cannot run
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.ir.node import Node
from gemini.profiling.flop_count import KernelCounts
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.measured_device import Device, is_out_of_memory
from gemini.profiling.meta_run import MetaWalk, count_node
from gemini.profiling.node_memory import NodeMemory
from gemini.profiling.node_runner import IsolatedNode, count_isolated
from gemini.profiling.preserved_model import PreservedModel

PER_PASS = 6  # nodes per class timed by a pass over single nodes


@dataclass(eq=False)
class NodeClass:
    """Nodes of equal cost, and their counted work and memory."""

    signature: str
    members: list[int] = field(default_factory=list)
    memory: NodeMemory = field(default_factory=NodeMemory)
    forward_work: KernelCounts = field(default_factory=KernelCounts)
    backward_work: KernelCounts = field(default_factory=KernelCounts)
    counted: bool = False  # whether work and memory are known
    failure: str = ""  # why it cannot be measured
    estimate_reason: str = ""  # why its work is estimated from sizes only
    writes: bool = False  # whether it writes its own parameters

    def due(self, turn: int) -> set[int]:
        """Return the members to time in a pass over single nodes, alternating where there are many."""
        step = max(1, len(self.members) // PER_PASS)
        return set(self.members[turn % step :: step][:PER_PASS])


class ClassSurvey:
    """Counts the work and memory of classes."""

    def __init__(self, flow: GradientFlow, classes: list[NodeClass], state: PreservedModel) -> None:
        self.flow, self.classes, self.state = flow, classes, state
        self.class_of = {member: found for found in classes for member in found.members}

    def count(self, walk: MetaWalk) -> None:
        """Count the work and memory of unmeasured classes on meta tensors."""

        def visit(_: GraphWalk, node: Node) -> None:
            found = self.class_of.get(node.id)
            if found is not None and node.id == found.members[0] and (found.failure or not found.counted):
                found.memory, found.forward_work, found.backward_work, found.estimate_reason = count_node(
                    walk, node, self.flow
                )

        walk.visit(visit)

    def count_on_values(self, walk: GraphWalk, device: Device) -> None:
        """Count the work and memory of classes on real values."""

        def visit(_: GraphWalk, node: Node) -> None:
            found = self.class_of.get(node.id)
            if found is not None and node.id == found.members[0]:
                self._count_guarded(walk, node, device, found)
                found.estimate_reason = found.estimate_reason if found.failure else ""

        walk.visit(visit)

    def survey(self, walk: GraphWalk, device: Device) -> None:
        """Count the first node of every class, and detect classes that write their own parameters."""

        def visit(_: GraphWalk, node: Node) -> None:
            found = self.class_of.get(node.id)
            if found is None or found.failure:
                return
            first = node.id == found.members[0]
            copies = self.state.copy_parameters(self.flow.model_tensors[node.id]) if first or found.writes else []
            if not first:
                self.state.restore_later(copies)
                return
            self._count_guarded(walk, node, device, found)
            found.writes = self.state.check_written(copies)

        walk.visit(visit)

    def _count_guarded(self, walk: GraphWalk, node: Node, device: Device, found: NodeClass) -> None:
        """Count a node; one that does not fit or cannot run in isolation is marked as failed."""
        if walk.lacks_input(node):
            found.failure = "an input did not fit in memory"
            return
        try:
            isolated = IsolatedNode(walk, node, self.flow)
            with walk.node_context(node), device.watch() as watch:
                found.memory, found.forward_work, found.backward_work = count_isolated(
                    isolated, watch, self.flow.model_tensors[node.id]
                )
            found.counted = True
        except Exception as error:
            found.failure = failure_text(error)
            if is_out_of_memory(error):
                device.release()


def failure_text(error: Exception) -> str:
    """Describe why a node could not be measured."""
    if is_out_of_memory(error):
        return "out of memory"
    text = str(error).splitlines()
    return f"cannot run in isolation: {type(error).__name__}: {text[0] if text else ''}"
