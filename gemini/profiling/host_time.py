"""Host time: the calling thread's time for each node of a step on an asynchronous device, and the step's time shares.

Where steps are host-bound, the calling thread's times are the step's. A pass that stops at every node cannot measure
them: its own work between nodes leaves cold caches, and backward switches threads at every node. So the graph runs as a
whole, and the clock is read at the boundaries of nodes:

    forward    │ a │ b │ c │           around every call
    backward   c ◄─ b ◄─ a ◄─          when autograd reaches the first function of a node

Autograd runs functions in reverse order of creation, so those of a node run consecutively, and its time ends at the
next node's first function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.profiling.class_measurement import Measurement
from gemini.profiling.measured_device import NodeTimes
from gemini.profiling.whole_step import DifferentiableWalk, run_backward

_MARK = "gemini node"


class HostTimeRun(DifferentiableWalk):
    """One step of a graph; `measure` returns the calling thread's time for each node."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor], device: torch.device) -> None:
        super().__init__(graph, inputs, device)
        self.spent: dict[int, float] = {}  # s, forward
        self.begins: list[tuple[float, int]] = []  # when backward reached a node

    def measure(self) -> dict[int, NodeTimes]:
        """Run a step and return the times of its nodes. Gradients are left in `.grad`."""
        output = self.output()
        self.results.clear()
        run_backward(output)
        del output
        ends = [*(begin for begin, _ in self.begins[1:]), time.perf_counter()]
        back = dict.fromkeys(self.spent, 0.0)
        for (begin, node), end in zip(self.begins, ends, strict=False):  # empty without a backward
            back[node] += end - begin
        return {node: NodeTimes(0.0, 0.0, ms * 1e3, back[node] * 1e3) for node, ms in self.spent.items()}

    def _advance(self, node: Node) -> None:
        with self.node_context(node):
            args, kwargs = self.decode_arguments(node, self.read)
            call = self.make_call(node, args, kwargs)
            begin = time.perf_counter()
            result = call()
            self.spent[node.id] = time.perf_counter() - begin
        self.results[node.id] = result
        if any(source == "arg" for source, _ in node.outputs):
            self.arguments[node.id] = (args, kwargs)
        for made in (result, [self.read(ref) for ref in node.mutates]):
            for _, tensor in tensors(made):
                self._mark(node, tensor.grad_fn)

    def _mark(self, node: Node, function: Any) -> None:
        """Record when backward reaches a function, if this node created it."""
        if function is not None and _MARK not in function.metadata:
            function.metadata[_MARK] = node.id
            function.register_prehook(self._recorder(node.id))

    def _recorder(self, node: int) -> Callable[[Any], None]:
        begins, clock = self.begins, time.perf_counter

        def record(_: Any) -> None:
            begins.append((clock(), node))

        return record


class NodeLaunch(NamedTuple):
    """The host and device time of one direction of one node."""

    host_ms: float
    device_ms: float
    launches: int


def step_shares(loads: Sequence[NodeLaunch]) -> list[float]:
    """Return what each load, in step order, adds to the completion time of the step (ms).

    The calling thread launches the kernels of a node in `host` ms; the device runs them in `device` ms, each after its
    launch and after the previous kernel:

        host    │ a │ b │ c │ d │
        device    │ a     │ b │ c │      │ d │      a and b bound by the device, d by the host

    The shares add up to the step; neither the host's times nor the device's would.
    """
    started = ended = 0.0
    found = []
    for load in loads:
        started += load.host_ms
        # The last kernel cannot start before the host has launched it.
        last = load.device_ms / max(1, load.launches)
        end = max(ended + load.device_ms, started + last if load.device_ms else 0.0)
        found.append(end - ended)
        ended = end
    if found and started > ended:
        found[-1] += started - ended
    return found


def step_times(classes: Sequence[str], measured: Sequence[Measurement]) -> list[tuple[float, float]]:
    """Return (forward, backward) ms of every node in a step; nodes of one class share their mean.

    On a synchronous device these are the measured times.
    """
    if not any(one.host_ms for one in measured):
        return [(one.forward.ms, one.backward.ms) for one in measured]
    forward = [NodeLaunch(one.forward_host.ms, one.forward.ms, one.forward_work.count) for one in measured]
    run_backward = [NodeLaunch(one.backward_host.ms, one.backward.ms, one.backward_work.count) for one in measured]
    found = step_shares([*forward, *reversed(run_backward)])
    count = len(measured)
    pooled: dict[str, list[tuple[float, float]]] = {}
    for name, *both in zip(classes, found[:count], reversed(found[count:]), strict=True):
        pooled.setdefault(name, []).append((both[0], both[1]))
    means = {
        name: (sum(f for f, _ in some) / len(some), sum(b for _, b in some) / len(some))
        for name, some in pooled.items()
    }
    return [means[name] for name in classes]
