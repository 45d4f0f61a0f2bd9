"""Passes: a training step run a node at a time, each node timed alone.

All nodes run forward in order, each cut off from the one before; then all run backward in reverse order, on the
gradients that their readers returned:

    forward    a ─┤cut├─ b ─┤cut├─ c ─┐         every ─ is one timed call
    backward   a ◄──────  b ◄──────  c ◄┘

So a node finds the machine as it does in a step: caches hold what the node before left, memory is taken and given
back in the same order, and the gradients of parameters stay until the end. That is why the times add up to a step's.
One pass costs about one step and reads every node once.

Where the model is on another device, or a step does not fit on it, nodes run one at a time instead: forward, then at
once backward on gradients made up, and nothing is kept but the values that later nodes read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.profiling.detach import TURN
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import Walk
from gemini.profiling.measured_device import Device, Span, Stopwatch, Times, is_out_of_memory
from gemini.profiling.node_classes import NodeClass, failure_of
from gemini.profiling.node_runner import Backward, Gradients, Isolation, given_already
from gemini.profiling.timer_overhead import EVERY, Overhead

FORWARD, BACKWARD = "forward", "backward"
Classes = dict[int, NodeClass]


@dataclass
class PassReading:
    """What one pass read: the times of nodes, and what every reading has too much."""

    times: dict[int, Times]
    overhead: Times
    stopwatch: Stopwatch
    gradients: dict[int, torch.Tensor]  # of parameters; whoever takes the reading drops them


class Pass(Walk):
    """One pass over a graph; `measure` returns what it read."""

    def __init__(
        self,
        flow: GradientFlow,
        inputs: dict[int, torch.Tensor],
        device: Device,
        classes: Classes,
        earlier: Stopwatch | None,
    ) -> None:
        super().__init__(flow.graph, inputs, device.torch_device)
        self.flow, self.classes, self.on = flow, classes, device
        self.watch = device.stopwatch(earlier)
        self.overhead = Overhead(device, self.watch, self._time_backward)
        self.timed: list[int] = []  # nodes whose times count
        self.sums: dict[int, torch.Tensor] = {}  # gradients of parameters
        self.turns: dict[Hashable, float] = {}  # ms of backward in the thread that runs it

    def measure(self) -> PassReading:
        """Time the nodes of the graph."""
        with no_garbage_collection():
            self._run()
        spans = self.watch.read()
        spans.update({key: spans[key]._replace(host_ms=ms) for key, ms in self.turns.items() if key in spans})
        none = Span(0.0)
        times = {}
        for id_ in self.timed:
            if not self.classes[id_].failure:
                forward, backward = spans[FORWARD, id_], spans.get((BACKWARD, id_), none)
                times[id_] = Times(forward.ms, backward.ms, forward.host_ms, backward.host_ms)
        return PassReading(times, self.overhead.read(spans), self.watch, self.sums)

    def _run(self) -> None:
        raise NotImplementedError

    def _launches(self, node: Node, direction: str) -> int:
        found = self.classes.get(node.id)
        if found is None:
            return 4
        return (found.forward_work if direction == FORWARD else found.backward_work).count

    def _time(self, node: Node, direction: str, call: Callable[[], Any]) -> Any:
        key: Hashable = (direction, node.id)
        return self.watch.time(key, call, self._launches(node, direction))

    def _time_backward(self, key: Hashable, call: Callable[[], Any], launches: int) -> Any:
        found = self.watch.time(key, call, launches)
        if self.on.runs_behind and (ms := TURN.take_ms()) is not None:
            self.turns[key] = ms
        return found

    def _failed(self, node: Node, error: Exception) -> None:
        found = self.classes.get(node.id)
        if found is not None:
            found.failure = failure_of(error)


class StepPass(Pass):
    """A pass as a step: all nodes forward, then all backward. Raises where memory runs out."""

    def _run(self) -> None:
        waiting: list[tuple[Node, Backward]] = []
        with RegionSwitch() as regions:
            for index, node in enumerate(self.graph.nodes):
                if node.is_source:
                    self.results[node.id] = self._source(node)
                else:
                    if node.region is not None:
                        regions.to(node.region)
                    backward = self._forward(node)
                    if backward is not None:
                        waiting.append((node, backward))
                if index % EVERY == 0:
                    self.overhead.forward()
                self._drop(node)
        self.results.clear()
        self._all_backward(waiting)

    def _forward(self, node: Node) -> Backward | None:
        """Run a node; its backward, if it takes part in it."""
        found = self.classes.get(node.id)
        if found is not None and found.failure:  # it was found that it cannot run alone
            self._advance(node)
            return None
        try:
            isolation = Isolation(self, node, self.flow, copies=False)
            result = self._time(node, FORWARD, isolation.forward)
            backward = isolation.backward(result)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._failed(node, error)
            self._advance(node)
            return None
        if found is not None:
            self.timed.append(node.id)
        self.results[node.id] = result
        if any(source == "arg" for source, _ in node.outputs):
            self.arguments[node.id] = (isolation.args, isolation.kwargs)
        return backward

    def _all_backward(self, waiting: list[tuple[Node, Backward]]) -> None:
        received: dict[Ref, Gradients] = {}
        count = 0
        while waiting:
            node, backward = waiting.pop()
            given = [received.pop(outlet.ref, []) or [outlet.ones()] for outlet in backward.outlets]
            try:
                call = backward.call(given, self.sums, stamped=self.on.runs_behind)
                found = self._time_backward((BACKWARD, node.id), call, self._launches(node, BACKWARD))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._failed(node, error)
                continue
            for ref, gradient in zip(backward.starts, found, strict=True):
                if gradient is not None and not self.graph.nodes[ref.node].is_source:
                    received.setdefault(ref, []).append(gradient)
            if count % EVERY == 0:
                self.overhead.backward()
            count += 1


class NodePass(Pass):
    """A pass that keeps nothing: a node is timed forward and backward where it stands, some nodes of every class."""

    def __init__(self, *args: Any, turn: int) -> None:
        super().__init__(*args)
        self.due = {member for found in set(self.classes.values()) for member in found.due(turn)}

    def _run(self) -> None:
        self.visit(self._visit)

    def _visit(self, _: Walk, node: Node) -> None:
        found = self.classes.get(node.id)
        if found is None or found.failure or node.id not in self.due:
            return
        if self.lacks_input(node):
            found.failure = "an input of it did not fit in memory"
            return
        try:
            with self.place(node):
                self._node(node)
        except Exception as error:
            self._failed(node, error)
            if is_out_of_memory(error):
                self.on.release()
            return
        self.timed.append(node.id)

    def _node(self, node: Node) -> None:
        self.overhead.forward()
        isolation = Isolation(self, node, self.flow)
        result = self._time(node, FORWARD, isolation.forward)
        backward = isolation.backward(result)
        del result
        if backward is not None:
            gradients, sums = backward.ones(), given_already(isolation)
            call = backward.call(gradients, sums, stamped=self.on.runs_behind)
            self._time_backward((BACKWARD, node.id), call, self._launches(node, BACKWARD))
            self.overhead.backward()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector strikes one node in thousands, and that one hard."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
