"""Capture driver: trace, compare with the model, make the failing region a basic block, and start over.

    trace the batch ──► trace a half batch ──► run the graph on the batch, a second and the half one
        │  refused          │ differs              │ differs from the model
        └──────────┬────────┴──────────────────────┘
                   ▼
       the smallest region around the failure becomes opaque; start over

Every round makes at least one more region opaque, so the loop ends: at worst with the model as one block, which is
correct but cannot be partitioned. The order is deterministic.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.capture.batch_dim import BatchLayout, candidate_layouts, find_batch_layout, second_batches
from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.memoized import find_caches
from gemini.capture.nested_training import refuse_training
from gemini.capture.options import CaptureOptions
from gemini.capture.python_state import (
    active_rates,
    branch_reads,
    fingerprint,
    glue_modules,
    idle_rates,
    layer_settings,
)
from gemini.capture.sample_loops import LoopMismatch, match_loop
from gemini.capture.scaling_reads import ScalingReadWatcher, find_scaling_lines
from gemini.capture.torch_flags import prefer_deterministic
from gemini.capture.trace_diff import CaptureSubject, Trace, first_mismatch, mark_batch_dims, takes_other_branch, trace
from gemini.capture.trace_state import TraceRefused
from gemini.capture.verify.graph_check import BackwardFailed, BatchRejected, GraphChecker
from gemini.capture.verify.step_observation import Differences, tensor_difference
from gemini.capture.warmup import Warmup, materialize
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall, bind, signature_of
from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.node import MODULES, Guard, Node
from gemini.ir.validity import Validity
from gemini.snapshot.model_state import ModelSnapshot

_log = logging.getLogger(__name__)
_SEEDS = (20_011, 7, 8, 9, 10, 11)
_RESIZED_TRIES = 2  # seeds tried for the captured branches at another batch size
_THOROUGH_SECONDS = 0.1  # models with a faster forward are checked by gradients on every batch


class CaptureDriver:
    """Captures one variant of a model for one call."""

    def __init__(self, model: nn.Module, call: ModelCall, leaf_policy: LeafPolicy, options: CaptureOptions) -> None:
        self.model, self.call, self.leaf_policy, self.options = model, call, leaf_policy, options
        held = (*call.tensors, *model.parameters(), *model.buffers())
        self.without_weights = any(tensor.device.type == "meta" for tensor in held)
        self.layout: BatchLayout | None = None
        if not self.without_weights:
            materialize(model, self._first_call)
        self.thorough = True
        self.pinned = ""  # why the graph holds for one batch size only
        self.checked: dict[str, str] = {}
        self.saved = ModelSnapshot(model, watch=True)
        self._before = self.saved.attributes  # warming up replaces it
        self.warmup = Warmup(model, self.saved)
        self.warmed_up = self.without_weights
        self.subject = CaptureSubject(model, call, self.saved, find_caches(model))
        self.checks = GraphChecker(model, call, self.saved)

    def _first_call(self) -> None:
        """Call the model on a few samples; raise its own error where it rejects the whole batch too."""
        layout = self.layout or next(candidate_layouts(self.call.tensors), None)
        few = self.call.tensors if layout is None else layout.copy(self.call.tensors, 0, min(2, layout.size))
        for inputs in (few, self.call.tensors):
            args, kwargs = self.call.arguments(inputs)
            try:
                with torch.no_grad():
                    self.model(*args, **kwargs)
                return
            except Exception:
                if inputs is self.call.tensors:
                    raise

    def capture(self) -> Graph:
        """Return the finest graph that equals the model on all batches tried."""
        try:
            graph = self._refine()
        finally:
            self.saved.restore()
            self._before.restore_containers()  # a cache by size: the model's own calls fill it
        graph.reassigned = tuple(sorted(self.saved.reassigned))
        return graph

    def _refine(self) -> Graph:
        held = (*self.call.tensors, *self.model.parameters())
        with self.saved.watch_writes(), prefer_deterministic(held), refuse_training():
            self.layout = find_batch_layout(self.model, self.call, self.warmup, self.options.batch)
            self.warmup.finish(self._first_call)
            while True:
                try:
                    return self._attempt()
                except TraceRefused as found:
                    reason = f"{found.reason} ({found.line})" if found.line else found.reason
                    _log.debug("%s: %s; functions %s", found.scope, reason, found.calls)
                    if found.released:
                        self.leaf_policy.release(found.released)
                    else:
                        self.leaf_policy.coarsen(found.scope, reason, found.calls)

    def _attempt(self) -> Graph:
        first = self._first_trace()
        self._keep_checkpoints(first)
        self.thorough = first.seconds <= _THOROUGH_SECONDS
        self._reuse("batch", first, gradients=False)
        first.release()
        graph = self._graph(first)
        self.checked = {}
        if "" in self.leaf_policy.blocks:  # the graph runs the model itself
            graph.checked = {"batch": "the model is one opaque block"}
            return graph
        resized = None if self.pinned else self._trace_resized(first, graph)
        if self.pinned:
            self.checked["half batch"] = f"the graph holds for this batch size only: {self.pinned}"
        if self.without_weights:
            graph.checked = {**self.checked, "batch": "sizes only: the model has no weights"}
            return graph
        self._check("batch", graph, self.call.tensors, gradients=self.thorough or resized is None)
        if resized is not None:
            self._check("half batch", graph, resized, gradients=True)
        self._check_second(graph)
        graph.checked = dict(self.checked)
        return graph

    def _first_trace(self) -> Trace:
        """Trace the batch. If the trace changes attributes, as a first call may do: warm up and repeat."""
        try:
            first = trace(self.subject, self.call.tensors, self.leaf_policy)
        except TraceRefused:
            if self.warmed_up or not self.saved.attributes.find_changes():
                raise
        else:
            if self.warmed_up or not self.saved.attributes.find_changes():
                return first
        self.warmed_up = True
        self.warmup.warm_up(self._first_call)
        return trace(self.subject, self.call.tensors, self.leaf_policy)

    def _keep_checkpoints(self, first: Trace) -> None:
        """Make modules opaque that checkpoint all of their forward: one checkpoint per part would save more tensors."""
        if names := [*first.tracer.checkpointing]:
            self.leaf_policy.blocks.update(dict.fromkeys(names[1:], "checkpointed"))
            raise TraceRefused((names[0],), "checkpointed", "")

    def _reuse(self, what: str, traced: Trace, gradients: bool) -> None:
        """For a large model, use the trace also as the run of the model that the graph is compared with."""
        if not self.thorough and not self.without_weights and not traced.tracer.saw_checkpoint:
            self.checks.adopt(what, traced, gradients)

    def _graph(self, first: Trace) -> Graph:
        tracer = first.tracer
        assert tracer.result is not None
        return Graph(
            type(self.model).__name__,
            tracer.nodes,
            list(tracer.guards.values()),
            tracer.inputs,
            tracer.result,
            blocks=self.leaf_policy.blocks | self.leaf_policy.host_rng_modules,
            calls=dict(self.leaf_policy.call_reasons),
            model=self.model,
            validity=self._validity(first),
        )

    def _validity(self, first: Trace) -> Validity:
        """Return the validity of the graph of a trace; batch dimensions are added once they are known."""
        args, kwargs = self.call.arguments()
        whole = {node.target for node in first.nodes if node.kind in MODULES}
        glue = glue_modules(self.model, whole)
        glue += branch_reads(first.tracer.reads(), self.model)
        leaves = [node for node in first.nodes if node.kind in MODULES]
        glue += idle_rates(self.model, (node.target for node in leaves if not node.random))
        glue += active_rates(self.model, (node.target for node in leaves if node.random))
        known = {*glue}
        glue += [name for name in layer_settings(self.model, whole) if name not in known]
        validity = Validity(signature_of(bind(self.model, args, kwargs)), {}, Region.current(), glue)
        self.saved.restore()
        validity.fingerprint = fingerprint(self.model, glue)
        return validity

    def _trace_resized(self, first: Trace, graph: Graph) -> list[torch.Tensor] | None:
        """Trace a batch of another size and find the batch dimensions; None where the model accepts no other size."""
        if self.layout is None:
            self.checked["half batch"] = "no input has a batch dimension"
            return None
        if times := self.options.repeats:
            self._match_repeats(first, graph, self.layout, times)
            return None
        inputs, size = self.layout.resize(self.call.tensors)
        try:
            other = self._trace_same_branches(first, inputs)
        except Exception as error:
            self.checked["half batch"] = f"the model rejects {size} samples: {type(error).__name__}"
            return None
        if other is None:
            self.checked["half batch"] = "takes another branch of the model on every seed tried"
            return None
        mismatch = first_mismatch(first, other)
        if mismatch is not None:
            node, reason = mismatch
            self._depends_on_batch(node.scope, f"{reason} at {node.name}", node.line)
            return None
        others = {_guard_key(guard) for guard in other.tracer.guards.values()}
        for guard in graph.guards:
            if guard.concrete and _guard_key(guard) not in others:
                reason = f"its Python code uses the batch size as a plain number: {guard.expr}"
                self._depends_on_batch(guard.scope, reason, guard.line)
                return None
        mark_batch_dims(graph.nodes, other.nodes, self.layout.size, size)
        self._record_batch_dims(graph, self.layout)
        return inputs

    def _match_repeats(self, first: Trace, graph: Graph, layout: BatchLayout, times: int) -> None:
        """Compare a micro-batch with a batch of `times` copies, over which the model's Python may loop."""
        try:
            whole = trace(self.subject, layout.repeat(self.call.tensors, times), self.leaf_policy)
        except Exception as error:
            self.checked["half batch"] = f"the model rejects {times} times the batch: {type(error).__name__}"
            return
        whole.release()
        try:
            rolled = match_loop(first, whole, times)
        except LoopMismatch as mismatch:
            self._refuse_scaling_reads(first, whole)
            self._depends_on_batch(
                mismatch.node.scope, f"{mismatch.reason} at {mismatch.node.name}", mismatch.node.line
            )
            return
        for node in graph.nodes:
            node.role = rolled.roles[node.id]
        others = [whole.nodes[rolled.images[node.id]] for node in graph.nodes]
        mark_batch_dims(graph.nodes, others, layout.size, times * layout.size)
        graph.rolled, graph.whole_batch_guards, graph.pins = times, rolled.whole_batch_guards, rolled.pins
        self._record_batch_dims(graph, layout)
        if graph.validity is not None:  # attributes that only the Python for many samples reads
            more = branch_reads(whole.tracer.reads(), self.model)
            graph.validity.glue += [name for name in more if name not in graph.validity.glue]
            self.saved.restore()
            graph.validity.fingerprint = fingerprint(self.model, graph.validity.glue)
        self.checked["half batch"] = f"{times} times the batch repeats it"

    def _record_batch_dims(self, graph: Graph, layout: BatchLayout) -> None:
        """Record the batch dimensions of the inputs."""
        graph.batch_size = layout.size
        for node in graph.nodes:
            if node.kind == "input":
                meta = next(iter(node.outputs.values()))
                if meta.batch_dim is not None and graph.validity is not None:
                    graph.validity.batch[node.target] = (meta.batch_dim, meta.batch_factor)

    def _trace_same_branches(self, first: Trace, inputs: Sequence[torch.Tensor]) -> Trace | None:
        """Return a trace of `inputs` with the branches of `first`; random branches (LayerDrop) need several tries.

        A rare branch is taken by forcing the random numbers that decided it.
        """
        for seed in (None, *_SEEDS[:_RESIZED_TRIES]):
            other = trace(self.subject, inputs, self.leaf_policy, seed)
            if seed is None:
                self._refuse_scaling_reads(first, other)
            if not takes_other_branch(first, other):
                self.checks.seeds["half batch"] = seed
                self._reuse("half batch", other, gradients=True)
                other.release()
                return other
        if not first.tracer.random_scalars:
            return None
        other = trace(self.subject, inputs, self.leaf_policy, random_scalars=first.tracer.random_scalars)
        other.release()
        return None if takes_other_branch(first, other) else other

    def _refuse_scaling_reads(self, first: Trace, other: Trace) -> None:
        """Make opaque the functions of inputs alone whose Python reads more from more samples.

        Only where the caller splits batches: otherwise a graph per value read is finer.
        """
        if self.options.sample_dims() and (lines := find_scaling_lines(first, other)):
            trace(self.subject, self.call.tensors, self.leaf_policy, scaling_reads=ScalingReadWatcher(lines))

    def _depends_on_batch(self, scope: tuple[str, ...], reason: str, line: str) -> None:
        """Refuse a small region that depends on the batch size; for a large one, fix the batch size."""
        module = self.model.get_submodule(scope[-1]) if scope and scope[-1] else self.model
        if _layers(module) * 2 <= _layers(self.model):
            raise TraceRefused(scope, reason, line)
        self.pinned = f"{reason} ({line})"
        self.checked["half batch"] = f"the graph holds for this batch size only: {self.pinned}"

    # ── comparing with the model ───────────────────────────────────────────────────────────────────────────────
    def _check_second(self, graph: Graph) -> None:
        for contents, inputs in second_batches(self.call, self.layout):
            what = f"second batch ({contents})"
            if not self.thorough and self.layout is not None and graph.batch_size is not None and not graph.rolled:
                inputs, _ = self.layout.resize(inputs)  # a large model: half of it, for speed
                what = f"half of a second batch ({contents})"
            try:
                for seed in _SEEDS:
                    self.checks.seeds[what] = seed
                    self.checks.forget(what)
                    if self._check(what, graph, inputs, gradients=self.thorough):
                        return
            except BatchRejected:
                continue
        self.checked.setdefault("second batch", "the model rejects every other batch tried")

    def _check(self, what: str, graph: Graph, inputs: Sequence[torch.Tensor], gradients: bool) -> bool:
        """Compare graph and model on one batch; return False if the batch takes another branch."""
        try:
            differences = self.checks.differences(what, graph, inputs, gradients)
        except GuardBroken as broken:
            if what == "batch":
                raise TraceRefused(("",), f"it does not repeat itself: {broken}", "") from None
            self._refuse_numbers(broken.guard)
            self.checked[what] = f"takes another branch: {broken}"
            return False
        except NodeFailed as failed:
            raise TraceRefused(failed.node.scope or ("",), f"{failed}", failed.node.line) from failed
        except BackwardFailed as failed:
            differences = Differences([f"its backward fails: {failed!s:.80}"], forward=True)
        if differences:
            self._blame(what, graph, inputs, differences)
        extent = "outputs, buffers, gradients"
        if not gradients:
            extent += " (by the same autograd graph)"
        if noisy := self.checks.noisy.get(what, 0):
            extent += f" ({noisy} of them as exactly as the model repeats itself)"
        self.checked[what] = extent if self.checks.finite(what) else f"{extent} (not all finite)"
        return True

    def _refuse_numbers(self, guard: Guard | None) -> None:
        """Refuse a region that reads a number which differs in every batch: each would need a variant."""
        if guard is None or not guard.data or not guard.concrete or isinstance(guard.expected, bool):
            return
        name = guard.scope[-1] if guard.scope else ""
        module = self.model.get_submodule(name) if name else self.model
        if isinstance(guard.expected, float) or _layers(module) * 2 <= _layers(self.model):
            raise TraceRefused(
                guard.scope or ("",), f"its Python code reads a number from data: {guard.expr}", guard.line
            )

    def _blame(self, what: str, graph: Graph, inputs: Sequence[torch.Tensor], differences: Differences) -> None:
        """Raise TraceRefused for the region that causes the difference."""
        line = differences.lines[0]
        again = trace(self.subject, inputs, self.leaf_policy, self.checks.seeds.get(what), keep=True)
        if differences.forward:
            node = self._first_difference(what, graph, again, inputs)
        else:
            node = _last_user(graph, differences.parameters)
        if node is None:
            # For example a cache that grows with every call.
            what = "it changes its arguments" if line.startswith("input ") else "graph and model differ"
            raise TraceRefused(("",), f"{what}: {line}", "")
        scope = (*node.scope, node.target) if node.kind == "block" else node.scope
        raise TraceRefused(scope or ("",), f"graph and model differ at {node.name}: {line}", node.line)

    def _first_difference(self, what: str, graph: Graph, again: Trace, inputs: Sequence[torch.Tensor]) -> Node | None:
        """Return the first node whose result differs from that in a trace of the same batch."""
        self.checks.begin(what)
        args, kwargs = self.call.arguments(inputs)
        found: list[Node] = []
        values = again.tracer.values or []

        def compare_node(node: Node, result: Any) -> None:
            if found or node.id >= len(values) or "empty" in node.target:  # uninitialized memory differs
                return
            made = [tensor for _, tensor in tensors(result)]
            expected = values[node.id]
            if len(made) != len(expected) or any(tensor_difference(a, b) for a, b in zip(expected, made, strict=True)):
                found.append(node)

        try:
            Execution(graph, self.model, bind(self.model, args, kwargs)).run(compare_node)
        except (GuardBroken, NodeFailed):
            pass
        finally:
            self.saved.restore()
        return found[0] if found else None


def _last_user(graph: Graph, names: list[str]) -> Node | None:
    """Return the last node that uses one of these parameters: if only gradients differ, the cause is there or later."""
    held = {node.id for node in graph.nodes if node.kind == "parameter" and node.name in names}
    users = [
        node
        for node in graph.nodes
        if held & {ref.node for ref in node.inputs()}
        or (node.kind in MODULES and any(name.startswith(f"{node.target}.") for name in names))
    ]
    return users[-1] if users else None


def _layers(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))


def _guard_key(guard: Any) -> tuple[str, str]:
    return str(guard.expr), repr(guard.expected)
