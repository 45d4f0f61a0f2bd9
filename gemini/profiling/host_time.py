"""The calling thread: how long it takes for each node of a step, where a device runs behind it.

Where the device waits for the thread, the thread's times are the step's. A pass that stops at every node would not do:
what it does in between makes the thread come back with cold caches, and backward changes hands at every node. So the
graph runs as it is, forward and backward in one piece, with a look at the clock at the ends of nodes:

    forward    │ a │ b │ c │           around every call
    backward   c ◄─ b ◄─ a ◄─          when autograd comes to the first function of a node

Autograd runs functions in the reverse order of their making, so those of a node run one after the other, and its time
is that until the next node's first.
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
from gemini.profiling.measured_device import Times
from gemini.profiling.whole_step import GraphRun, backward

_MARK = "gemini node"


class ThreadRun(GraphRun):
    """One step of a graph; `measure` says how long the calling thread took for its nodes."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor], device: torch.device) -> None:
        super().__init__(graph, inputs, device)
        self.spent: dict[int, float] = {}  # s, forward
        self.begins: list[tuple[float, int]] = []  # when backward came to a node

    def measure(self) -> dict[int, Times]:
        """Run a step. Gradients are left in `.grad`."""
        output = self.output()
        self.results.clear()
        backward(output)
        del output
        ends = [*(begin for begin, _ in self.begins[1:]), time.perf_counter()]
        back = dict.fromkeys(self.spent, 0.0)
        for (begin, node), end in zip(self.begins, ends, strict=False):  # without a backward there is no beginning
            back[node] += end - begin
        return {node: Times(0.0, 0.0, ms * 1e3, back[node] * 1e3) for node, ms in self.spent.items()}

    def _advance(self, node: Node) -> None:
        with self.place(node):
            args, kwargs = self.decoded(node, self.read)
            call = self.call_of(node, args, kwargs)
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
        """Have backward tell when it comes to a function, if this node made it."""
        if function is not None and _MARK not in function.metadata:
            function.metadata[_MARK] = node.id
            function.register_prehook(self._teller(node.id))

    def _teller(self, node: int) -> Callable[[Any], None]:
        begins, clock = self.begins, time.perf_counter

        def tell(_: Any) -> None:
            begins.append((clock(), node))

        return tell


class Load(NamedTuple):
    """What one direction of one node asks of both sides."""

    host_ms: float
    device_ms: float
    launches: int


def shares(loads: Sequence[Load]) -> list[float]:
    """For loads in the order of a step, what each adds to the time at which all work so far is done (ms)."""
    started = ended = 0.0
    found = []
    for load in loads:
        started += load.host_ms
        # The last kernel cannot start before the host has come to it.
        last = load.device_ms / max(1, load.launches)
        end = max(ended + load.device_ms, started + last if load.device_ms else 0.0)
        found.append(end - ended)
        ended = end
    if found and started > ended:
        found[-1] += started - ended
    return found


def step_times(classes: Sequence[str], measured: Sequence[Measurement]) -> list[tuple[float, float]]:
    """(forward, backward) ms of every node in a step; nodes of one class share their mean.

    Where the device does not run behind, these are the times measured.
    """
    if not any(one.host_ms for one in measured):
        return [(one.forward.ms, one.backward.ms) for one in measured]
    forward = [Load(one.forward_host.ms, one.forward.ms, one.forward_work.count) for one in measured]
    backward = [Load(one.backward_host.ms, one.backward.ms, one.backward_work.count) for one in measured]
    found = shares([*forward, *reversed(backward)])
    count = len(measured)
    pooled: dict[str, list[tuple[float, float]]] = {}
    for name, *both in zip(classes, found[:count], reversed(found[count:]), strict=True):
        pooled.setdefault(name, []).append((both[0], both[1]))
    means = {
        name: (sum(f for f, _ in some) / len(some), sum(b for _, b in some) / len(some))
        for name, some in pooled.items()
    }
    return [means[name] for name in classes]
