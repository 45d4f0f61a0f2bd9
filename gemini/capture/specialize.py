"""Specialization: the variants of a model's graph for calls that take different branches of its Python.

A graph holds for calls of one signature (structure, plain values, dtypes, all sizes but the batch), one state of
the model's Python (training flag, attributes, configuration), one gradient and autocast mode, and one outcome of
every guard. A call that fits no graph captures another; if a guard breaks during a run, the run is undone first.
Beyond `limit` variants the model itself runs: always correct, never partitioned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.graph_guards import early_guards
from gemini.capture.module_hooks import run_with_hooks
from gemini.capture.python_state import fingerprint
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import bind, signature_of
from gemini.ir.encode import follow, tensors
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.snapshot.model_state import AttributeSnapshot
from gemini.snapshot.rng_snapshot import GeneratorStates

if TYPE_CHECKING:
    from gemini.ir.graph import Graph


class GraphVariants:
    """All graphs of one model, the most recently used first."""

    def __init__(self, model: nn.Module, recapture: Callable[[Any, Any], Graph], limit: int = 32) -> None:
        self.model, self.recapture, self.limit = model, recapture, limit
        self.graphs: list[Graph] = []
        self.captured = 0  # variants captured after the first
        self.eager = 0  # calls that ran the model itself

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by the graph that fits it, captured if necessary; beyond `limit`, run the model itself."""
        for attempt in range(2):
            try:
                return run_with_hooks(self.model, args, kwargs, lambda _, a, k: self._run(a, k))
            except _NoVariant:
                if attempt or len(self.graphs) >= self.limit:
                    break
                self._capture(args, kwargs)
        self.eager += 1
        return self.model(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = bind(self.model, args, kwargs)
        for graph in list(self.graphs):
            if (
                graph.is_whole
                or not accepts_call(graph, bound)
                or early_guards(graph).find_broken(self.model, bound) is not None
            ):
                continue
            done, output = self._attempt(graph, bound)
            if done:
                self.graphs.remove(graph)
                self.graphs.insert(0, graph)
                return output
        raise _NoVariant

    def _capture(self, args: Any, kwargs: Any) -> Graph:
        graph = self.recapture(args, kwargs)
        graph.variants = self
        self.graphs.insert(0, graph)
        self.captured += 1
        return graph

    def _attempt(self, graph: Graph, bound: dict[str, Any]) -> tuple[bool, Any]:
        """Return (True, output), or (False, None) with all state restored."""
        before = RunSnapshot(graph, self.model, bound)
        try:
            return True, Execution(graph, self.model, bound).run()
        except (GuardBroken, NodeFailed):
            # A failing node fails in the model too, which then raises its own error; or the graph does not hold for
            # this call, and another variant or the model runs.
            before.restore()
            return False, None


class _NoVariant(Exception):
    """No graph fits a call."""


class RunSnapshot:
    """The state that a run of a graph may change."""

    def __init__(self, graph: Graph, model: nn.Module, bound: dict[str, Any]) -> None:
        self.generators = GeneratorStates()
        self.attributes = (
            AttributeSnapshot(model) if any(node.kind == "block" or node.changes for node in graph.nodes) else None
        )
        written = {ref.node for node in graph.nodes for ref in node.mutates}
        inputs = [tensor for _, tensor in tensors(bound)] if written & set(graph.inputs) else []
        tensors_written = [*model.buffers(), *inputs]
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in tensors_written if tensor.device.type != "meta"]

    def restore(self) -> None:
        """Undo the run."""
        if self.attributes is not None:
            self.attributes.restore()
        with torch.no_grad():
            for tensor, saved in self.tensors:
                tensor.data.copy_(saved)
        self.generators.restore()


def accepts_call(graph: Graph, bound: dict[str, Any]) -> bool:
    """Return whether a call, bound by name, may run by a graph; guards on contents are checked during the run."""
    if graph.rolled and not _has_captured_size(graph, bound):
        return False
    validity = graph.validity
    if validity is None:
        return True
    if Region.current() != validity.region or not validity.fits(signature_of(bound)):
        return False
    return fingerprint(graph.bound_model(), validity.glue) == validity.fingerprint


def _has_captured_size(graph: Graph, bound: dict[str, Any]) -> bool:
    """Return whether a call has as many samples as the captured one: a rolled graph holds for no other number."""
    inputs = [(follow(bound, path), next(iter(graph.nodes[at].outputs.values()))) for at, path in graph.inputs.items()]
    return all(tuple(tensor.shape) == meta.shape for tensor, meta in inputs)
