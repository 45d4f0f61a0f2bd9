"""Node timer: passes that run a training step node by node and time each node.

All nodes run forward in order, each detached from the previous one; then all run backward in reverse order, on the
gradients that their readers returned:

    forward    a ─┤detach├─ b ─┤detach├─ c ─┐         every ─ is one timed call
    backward   a ◄────────── b ◄────────── c ◄┘

So a node sees the machine state of a step: caches hold the results of the previous node, memory is allocated and freed
in the same order, and parameter gradients stay until the end. That is why node times add up to the step time. One pass
costs about one step and reads every node once.

Where the model is on another device, or a step does not fit, nodes run one at a time instead: forward, then backward on
gradients of ones, keeping only the values that later nodes read.
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
from gemini.profiling.detach import BACKWARD_TIMER
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.measured_device import CallTime, Device, NodeTimes, Stopwatch, is_out_of_memory
from gemini.profiling.node_classes import NodeClass, failure_text
from gemini.profiling.node_runner import Gradients, IsolatedNode, NodeBackward, zero_shared_gradients
from gemini.profiling.timer_overhead import EVERY, TimerOverhead

FORWARD, BACKWARD = "forward", "backward"
Classes = dict[int, NodeClass]


@dataclass
class PassTimes:
    """The readings of one pass: node times, and the timer overhead in each of them."""

    times: dict[int, NodeTimes]
    overhead: NodeTimes
    stopwatch: Stopwatch
    gradients: dict[int, torch.Tensor]  # of parameters; dropped by the consumer


class TimingPass(GraphWalk):
    """One pass over a graph; `measure` returns its readings."""

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
        self.overhead = TimerOverhead(device, self.watch, self._time_backward)
        self.timed: list[int] = []  # nodes whose times count
        self.sums: dict[int, torch.Tensor] = {}  # gradients of parameters
        self.thread_ms: dict[Hashable, float] = {}  # ms of backward in the autograd thread

    def measure(self) -> PassTimes:
        """Time the nodes of the graph."""
        with no_garbage_collection():
            self._run()
        spans = self.watch.read()
        spans.update({key: spans[key]._replace(host_ms=ms) for key, ms in self.thread_ms.items() if key in spans})
        none = CallTime(0.0)
        times = {}
        for id_ in self.timed:
            if not self.classes[id_].failure:
                forward, backward = spans[FORWARD, id_], spans.get((BACKWARD, id_), none)
                times[id_] = NodeTimes(forward.ms, backward.ms, forward.host_ms, backward.host_ms)
        return PassTimes(times, self.overhead.read(spans), self.watch, self.sums)

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
        if self.on.is_asynchronous and (ms := BACKWARD_TIMER.take_ms()) is not None:
            self.thread_ms[key] = ms
        return found

    def _record_failure(self, node: Node, error: Exception) -> None:
        found = self.classes.get(node.id)
        if found is not None:
            found.failure = failure_text(error)


class StepPass(TimingPass):
    """A pass in step order: all nodes forward, then all backward. Raises on out of memory."""

    def _run(self) -> None:
        waiting: list[tuple[Node, NodeBackward]] = []
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
        self._run_backwards(waiting)

    def _forward(self, node: Node) -> NodeBackward | None:
        """Run a node; return its backward, if it has one."""
        found = self.classes.get(node.id)
        if found is not None and found.failure:  # it cannot run in isolation
            self._advance(node)
            return None
        try:
            isolated = IsolatedNode(self, node, self.flow, copies=False)
            result = self._time(node, FORWARD, isolated.forward)
            backward = isolated.backward(result)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._record_failure(node, error)
            self._advance(node)
            return None
        if found is not None:
            self.timed.append(node.id)
        self.results[node.id] = result
        if any(source == "arg" for source, _ in node.outputs):
            self.arguments[node.id] = (isolated.args, isolated.kwargs)
        return backward

    def _run_backwards(self, waiting: list[tuple[Node, NodeBackward]]) -> None:
        received: dict[Ref, Gradients] = {}
        count = 0
        while waiting:
            node, backward = waiting.pop()
            gradients = [
                received.pop(grad_output.ref, []) or [grad_output.ones()] for grad_output in backward.grad_outputs
            ]
            try:
                call = backward.call(gradients, self.sums, timed_in_thread=self.on.is_asynchronous)
                found = self._time_backward((BACKWARD, node.id), call, self._launches(node, BACKWARD))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._record_failure(node, error)
                continue
            for ref, gradient in zip(backward.starts, found, strict=True):
                if gradient is not None and not self.graph.nodes[ref.node].is_source:
                    received.setdefault(ref, []).append(gradient)
            if count % EVERY == 0:
                self.overhead.backward()
            count += 1


class NodePass(TimingPass):
    """A pass that keeps no history: some nodes of every class, each timed forward and backward in place."""

    def __init__(self, *args: Any, turn: int) -> None:
        super().__init__(*args)
        self.due = {member for found in set(self.classes.values()) for member in found.due(turn)}

    def _run(self) -> None:
        self.visit(self._visit)

    def _visit(self, _: GraphWalk, node: Node) -> None:
        found = self.classes.get(node.id)
        if found is None or found.failure or node.id not in self.due:
            return
        if self.lacks_input(node):
            found.failure = "an input did not fit in memory"
            return
        try:
            with self.node_context(node):
                self._node(node)
        except Exception as error:
            self._record_failure(node, error)
            if is_out_of_memory(error):
                self.on.release()
            return
        self.timed.append(node.id)

    def _node(self, node: Node) -> None:
        self.overhead.forward()
        isolated = IsolatedNode(self, node, self.flow)
        result = self._time(node, FORWARD, isolated.forward)
        backward = isolated.backward(result)
        del result
        if backward is not None:
            gradients, sums = backward.ones(), zero_shared_gradients(isolated)
            call = backward.call(gradients, sums, timed_in_thread=self.on.is_asynchronous)
            self._time_backward((BACKWARD, node.id), call, self._launches(node, BACKWARD))
            self.overhead.backward()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would distort the time of a single node."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
