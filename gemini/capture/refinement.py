"""Refinement: trace, compare with the model, make whatever fails a basic block, and begin again.

    trace the batch ──► trace a half batch ──► run the graph on the batch, a second and the half one
        │  refused          │ differs              │ differs from the model
        └──────────┬────────┴──────────────────────┘
                   ▼
       the smallest region around the failure is kept whole; start over

Every round keeps at least one more region whole, so it ends: at the worst with the whole model as one block, which
is right and cannot be cut. The order is deterministic.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.capture.batches import BatchPlan, candidates, find_batch, second_batches
from gemini.capture.binding import Call, bind, signature_of
from gemini.capture.caches import find_caches
from gemini.capture.executor import Execution, GuardBroken, NodeFailed
from gemini.capture.fingerprint import fingerprint, glue_modules
from gemini.capture.granularity import Granularity
from gemini.capture.graph import Graph
from gemini.capture.hooks import with_hooks
from gemini.capture.node import MODULES, Node
from gemini.capture.observation import Observation, compare, observe, tensor_difference
from gemini.capture.recording import Coarsen
from gemini.capture.regions import Region
from gemini.capture.state import Saved, settle
from gemini.capture.traces import Subject, Trace, first_mismatch, mark_batch, trace
from gemini.capture.values import tensors
from gemini.capture.variants import Validity

_log = logging.getLogger(__name__)
_SEED = 20_011
_THOROUGH_PARAMETERS = 30_000_000  # models up to this size are checked with gradients on every batch


class Refinement:
    """Captures one variant of a model for one call."""

    def __init__(self, model: nn.Module, call: Call, granularity: Granularity) -> None:
        self.model, self.call, self.granularity = model, call, granularity
        self.saved: Saved = settle(model, self._first_call)
        self.subject = Subject(model, call, self.saved, find_caches(model))
        self.plan: BatchPlan | None = None
        self.checked: dict[str, str] = {}
        self.thorough = sum(p.numel() for p in model.parameters()) <= _THOROUGH_PARAMETERS
        self.pinned = ""  # why the graph holds for one batch size only
        self.expected: dict[str, Observation | None] = {}

    def _first_call(self) -> None:
        """A call on few samples; the model's own error where even the whole batch is rejected."""
        plan = next(candidates(self.call.tensors), None)
        few = self.call.tensors if plan is None else plan.take(self.call.tensors, 0, min(2, plan.size))
        for given in (few, self.call.tensors):
            args, kwargs = self.call.arguments(given)
            try:
                with torch.no_grad():
                    self.model(*args, **kwargs)
                return
            except Exception:
                if given is self.call.tensors:
                    raise

    def capture(self) -> Graph:
        """The finest graph that equals the model on all batches tried."""
        try:
            self.plan = find_batch(self.model, self.call, self.saved)
            while True:
                try:
                    return self._attempt()
                except Coarsen as found:
                    reason = f"{found.reason} ({found.line})" if found.line else found.reason
                    _log.debug("%s: %s; functions %s", found.scope, reason, found.calls)
                    self.granularity.coarsen(found.scope, reason, found.calls)
        finally:
            self.saved.restore()

    def _attempt(self) -> Graph:
        first = trace(self.subject, self.call.tensors, self.granularity)
        graph = self._graph(first)
        self.checked = {}
        if "" in self.granularity.blocks:  # the model itself runs: nothing can differ
            graph.checked = {"batch": "the model runs whole"}
            return graph
        resized = None if self.pinned else self._resized(first, graph)
        if self.pinned:
            self.checked["half batch"] = f"the graph holds for this batch size only: {self.pinned}"
        self._check("batch", graph, self.call.tensors, first, gradients=self.thorough)
        if resized is not None:
            self._check("half batch", graph, resized, None, gradients=True)
        self._check_second(graph)
        graph.checked = dict(self.checked)
        return graph

    def _graph(self, first: Trace) -> Graph:
        tracer = first.tracer
        assert tracer.result is not None
        return Graph(
            type(self.model).__name__,
            tracer.nodes,
            list(tracer.guards.values()),
            tracer.inputs,
            tracer.result,
            blocks=dict(self.granularity.blocks),
            calls=dict(self.granularity.call_reasons),
            model=self.model,
            validity=self._validity(first),
        )

    def _validity(self, first: Trace) -> Validity:
        """For which calls the graph of a trace holds; the batch dimensions are added once they are known."""
        args, kwargs = self.call.arguments()
        whole = {node.target for node in first.nodes if node.kind in MODULES}
        glue = glue_modules(self.model, whole)
        validity = Validity(signature_of(bind(self.model, args, kwargs)), {}, Region.current(), glue)
        self.saved.restore()
        validity.fingerprint = fingerprint(self.model, glue)
        return validity

    def _resized(self, first: Trace, graph: Graph) -> list[torch.Tensor] | None:
        """Trace a batch of another size and find the batch dimensions; None where the model accepts no other."""
        if self.plan is None:
            self.checked["half batch"] = "no input has a batch dimension"
            return None
        given, size = self.plan.resized(self.call.tensors)
        try:
            other = trace(self.subject, given, self.granularity)
        except Exception as error:
            self.checked["half batch"] = f"the model rejects {size} samples: {type(error).__name__}"
            return None
        mismatch = first_mismatch(first, other)
        if mismatch is not None:
            node, reason = mismatch
            self._depends_on_batch(node.scope, f"{reason} at {node.name}", node.line)
            return None
        others = {_fact(guard) for guard in other.tracer.guards.values()}
        for guard in graph.guards:
            if guard.concrete and _fact(guard) not in others:
                reason = f"its Python code uses the batch size as a plain number: {guard.expr}"
                self._depends_on_batch(guard.scope, reason, guard.line)
                return None
        mark_batch(graph.nodes, other.nodes, self.plan.size, size)
        graph.batch_size = self.plan.size
        for node in graph.nodes:
            if node.kind == "input":
                meta = next(iter(node.outputs.values()))
                if meta.batch_dim is not None and graph.validity is not None:
                    graph.validity.batch[node.target] = (meta.batch_dim, meta.batch_factor)
        return given

    def _depends_on_batch(self, scope: tuple[str, ...], reason: str, line: str) -> None:
        """A small region that depends on the batch size is kept whole; for a large one the batch size is fixed."""
        module = self.model.get_submodule(scope[-1]) if scope and scope[-1] else self.model
        if _layers(module) * 2 <= _layers(self.model):
            raise Coarsen(scope, reason, line)
        self.pinned = f"{reason} ({line})"
        self.checked["half batch"] = f"the graph holds for this batch size only: {self.pinned}"

    # ── comparing with the model ───────────────────────────────────────────────────────────────────────────────
    def _check_second(self, graph: Graph) -> None:
        for what, given in second_batches(self.call, self.plan):
            try:
                if self._check(f"second batch ({what})", graph, given, None, gradients=self.thorough):
                    return
            except _Rejected:
                continue
        self.checked.setdefault("second batch", "the model rejects every other batch tried")

    def _check(
        self, what: str, graph: Graph, given: Sequence[torch.Tensor], first: Trace | None, gradients: bool
    ) -> bool:
        """Compare graph and model on one batch; False if the batch takes another way through the model."""
        expected = self._expected(what, given, gradients)
        self._begin(what)
        try:
            found = observe(lambda a, k: self._run(graph, a, k), self.model, self.call, given, gradients)
        except GuardBroken as broken:
            if first is not None:
                raise Coarsen(("",), f"it does not repeat itself: {broken}", "") from None
            self.checked[what] = f"takes another way: {broken}"
            return False
        except NodeFailed as failed:
            raise Coarsen(failed.node.scope or ("",), f"{failed}", failed.node.line) from failed
        finally:
            self.saved.restore()
        differences = compare(expected, found)
        if differences:
            self._blame(graph, given, differences.lines[0], differences.forward, differences.parameters)
        extent = "outputs, buffers, gradients" if gradients else "outputs, buffers"
        self.checked[what] = extent if expected.finite else f"{extent} (not all finite)"
        return True

    def _begin(self, what: str) -> None:
        """The state before a run; a second batch also gets other random numbers, so that baked-in ones show."""
        self.saved.restore()
        if what.startswith("second"):
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            np.random.seed(_SEED)

    def _expected(self, what: str, given: Sequence[torch.Tensor], gradients: bool) -> Observation:
        if what not in self.expected:
            self._begin(what)
            try:
                self.expected[what] = observe(lambda a, k: self.model(*a, **k), self.model, self.call, given, gradients)
            except Exception:
                if what == "batch":
                    raise
                self.expected[what] = None
            finally:
                self.saved.restore()
        seen = self.expected[what]
        if seen is None:
            raise _Rejected
        return seen

    def _run(self, graph: Graph, args: Any, kwargs: Any) -> Any:
        return with_hooks(
            self.model, args, kwargs, lambda _, a, k: Execution(graph, self.model, bind(self.model, a, k)).run()
        )

    def _blame(self, graph: Graph, given: Sequence[torch.Tensor], line: str, forward: bool, names: list[str]) -> None:
        """Raise Coarsen for the region that made the difference."""
        again = trace(self.subject, given, self.granularity)
        node = self._first_difference(graph, again, given) if forward else None
        if node is None:
            users = [n for n in graph.nodes if n.kind == "parameter" and n.name in names]
            ids = {n.id for n in users}
            prefixes = tuple(f"{n.target}." for n in graph.nodes if n.kind in ("module", "block"))
            consumers = [
                n
                for n in graph.nodes
                if ids & {ref.node for ref in n.inputs()}
                or (n.kind in ("module", "block") and any(name.startswith(f"{n.target}.") for name in names))
            ]
            node = consumers[-1] if consumers and prefixes else None
        if node is None:
            raise Coarsen(("",), f"graph and model differ: {line}", "")
        scope = (*node.scope, node.target) if node.kind == "block" else node.scope
        raise Coarsen(scope or ("",), f"graph and model differ at {node.name}: {line}", node.line)

    def _first_difference(self, graph: Graph, again: Trace, given: Sequence[torch.Tensor]) -> Node | None:
        """The first node whose result differs from the one in a trace of the same batch."""
        self.saved.restore()
        args, kwargs = self.call.arguments(given)
        found: list[Node] = []

        def look(node: Node, result: Any) -> None:
            if found or node.id >= len(again.nodes) or "empty" in node.target:  # uninitialized memory differs
                return
            made = [tensor for _, tensor in tensors(result)]
            expected = again.tracer.values[node.id]
            if len(made) != len(expected) or any(tensor_difference(a, b) for a, b in zip(expected, made, strict=True)):
                found.append(node)

        try:
            Execution(graph, self.model, bind(self.model, args, kwargs)).run(look)
        except (GuardBroken, NodeFailed):
            pass
        finally:
            self.saved.restore()
        return found[0] if found else None


class _Rejected(Exception):
    """The model itself rejects a batch that was made from the captured one."""


def _layers(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))


def _fact(guard: Any) -> tuple[str, str]:
    return str(guard.expr), repr(guard.expected)
