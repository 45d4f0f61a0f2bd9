"""Rounds: which nodes are measured when.

    survey    one walk: work, memory and a first time of the first node of every class
    round 1…n one walk each: a few nodes of every class are timed; then one whole step
    count     one meta walk, for classes that do not fit or cannot run

Readings of a class come from several of its nodes and from several rounds, so that a disturbance of the machine
spoils a few of them and not all of one class. Steps are timed between the rounds, under the same conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemini.capture.node import Node
from gemini.profiling.device import Backward, Device, Times, is_out_of_memory
from gemini.profiling.examination import examine
from gemini.profiling.flow import GradientFlow, values_size
from gemini.profiling.isolation import Isolation
from gemini.profiling.measurement import Memory
from gemini.profiling.meta import MetaWalk, count
from gemini.profiling.unchanged import Unchanged
from gemini.profiling.walk import Walk
from gemini.profiling.work import Work

PER_ROUND = 6  # nodes of a class that are timed in a round
_BRIEF_MS = 1.0  # nodes shorter than this are timed several times in a row
_REPEATS = 4
_LARGE = 1 << 20  # bytes of parameters
Progress = Callable[[str], None]


@dataclass
class NodeClass:
    """Equal nodes, and what is known about them so far."""

    signature: str
    members: list[int] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    forward_work: Work = field(default_factory=Work)
    backward_work: Work = field(default_factory=Work)
    failure: str = ""  # why it cannot be measured
    guess: str = ""  # why even its work is known by sizes only
    writes: bool = False  # it writes its own parameters
    host_ms: float = 0.0
    fresh: bool = False  # its gradients are mostly those of parameters, and large

    def due(self, turn: int) -> set[int]:
        """The members to be timed in a round: not the same ones each time where there are many."""
        step = max(1, len(self.members) // PER_ROUND)
        return set(self.members[turn % step :: step][:PER_ROUND])


class Rounds:
    """Measures classes of nodes on a device."""

    def __init__(self, device: Device, flow: GradientFlow, classes: list[NodeClass], state: Unchanged) -> None:
        self.device, self.flow, self.classes, self.state = device, flow, classes, state
        self.of = {member: found for found in classes for member in found.members}

    def count(self, walk: MetaWalk) -> None:
        """Count the work of classes that were not measured, and their memory as far as that follows from sizes."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is not None and node.id == found.members[0] and not found.times:
                found.memory, found.forward_work, found.backward_work, found.guess = count(walk, node, self.flow)

        walk.visit(visit)

    def look(self, walk: Walk) -> None:
        """Count the work and memory of classes on real values, without timing them."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is not None and node.id == found.members[0]:
                self._guarded(walk, node, found, lambda: self._examine(walk, node, found))
                found.guess = found.guess if found.failure else ""

        walk.visit(visit)

    def survey(self, walk: Walk) -> None:
        """Measure the first node of every class."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is None or found.failure:
                return
            first = node.id == found.members[0]
            kept = self.state.keep(walk.held_by(node)) if first or found.writes else []
            if not first:
                self.state.hold(kept)
                return
            self._guarded(walk, node, found, lambda: self._examine(walk, node, found))
            if not found.failure:
                self._guarded(walk, node, found, lambda: self._first(walk, node, found))
            found.writes = self.state.check(kept)

        walk.visit(visit)

    def time(self, walk: Walk, turn: int) -> None:
        """Time some nodes of every class."""

        def visit(_: Walk, node: Node) -> None:
            found = self.of.get(node.id)
            if found is not None and not found.failure and node.id in found.due(turn):
                self._guarded(walk, node, found, lambda: self._sample(walk, node, found))

        walk.visit(visit)

    # ── one node ───────────────────────────────────────────────────────────────────────────────────────────────
    def _guarded(self, walk: Walk, node: Node, found: NodeClass, measure: Callable[[], None]) -> None:
        """A node that does not fit, or cannot run alone, is marked; profiling goes on."""
        if walk.lacks_input(node):
            found.failure = "an input of it did not fit in memory"
            return
        try:
            measure()
        except Exception as error:
            if is_out_of_memory(error):
                found.failure = "out of memory"
                self.device.release()
            else:
                text = str(error).splitlines()
                found.failure = f"cannot run alone: {type(error).__name__}: {text[0] if text else ''}"

    def _examine(self, walk: Walk, node: Node, found: NodeClass) -> None:
        isolation = Isolation(walk, node, self.flow)
        held = sum(t.numel() * t.element_size() for t in walk.held_by(node) if t.requires_grad)
        found.fresh = held > max(_LARGE, values_size(walk.graph, node))
        with walk.place(node), self.device.watch() as watch:
            found.memory, found.forward_work, found.backward_work = examine(isolation, watch, walk.held_by(node))

    def _first(self, walk: Walk, node: Node, found: NodeClass) -> None:
        """Whatever is done once is done now; where the host runs ahead, find out how long it needs."""
        times = self._once(walk, node, found)
        found.host_ms = times.forward_host + times.backward_host
        if not found.host_ms:
            found.times.append(times)

    def _sample(self, walk: Walk, node: Node, found: NodeClass) -> None:
        times = self._once(walk, node, found)
        found.times.append(times)
        found.host_ms = min(found.host_ms, times.forward_host + times.backward_host)
        if times.forward + times.backward < _BRIEF_MS:
            found.times += [self._once(walk, node, found) for _ in range(_REPEATS - 1)]

    def _once(self, walk: Walk, node: Node, found: NodeClass) -> Times:
        isolation = Isolation(walk, node, self.flow)

        def prepare(result: Any) -> Backward | None:
            backward = isolation.prepare(result)
            if backward is not None and found.fresh:
                self.device.refresh()
            return backward

        with walk.place(node):
            return self.device.time(isolation.forward, prepare, found.host_ms)
