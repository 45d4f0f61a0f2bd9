"""Twin session: runs the steps of one session of the script on the mirror of its graph and the twins of its steps.

    session.run(fetches)   no gradients reached      the same ops of the mirror
                           gradients, first time     twin and untouched graph on the same batch and random numbers,
                                                     compared without an update; then the step on the twin
                           gradients                 the twin

The session of the script keeps its graph, its fetches and its errors; a second session, on the mirror, does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import GraphError
from gemini.tensorflow.first_step import compare_steps, reach_ops
from gemini.tensorflow.forward_facts import ForwardFacts, forward_ops
from gemini.tensorflow.gradient_notes import GradientNote, notes_of
from gemini.tensorflow.graph_branches import CONDITIONALS
from gemini.tensorflow.mirror_graph import MirrorGraph
from gemini.tensorflow.rules.registry import SOURCES
from gemini.tensorflow.servers import Servers, servers_for
from gemini.tensorflow.session_patches import has_references, leave
from gemini.tensorflow.sharded_variables import VariableShards, follow_updates, plan_variables
from gemini.tensorflow.split_plan import BatchSource, SplitRefused
from gemini.tensorflow.twin_builder import TwinBuilder, forward_facts
from gemini.tensorflow.twin_graph import TwinGraph
from gemini.tensorflow.twin_report import TwinReport, batch_text

_NOMINAL = 32  # samples, where stages are cut before a batch is known


@dataclass(frozen=True)
class StepKind:
    """What a run fetches: the notes whose gradients it reaches, and the ops that take data in."""

    notes: tuple[GradientNote, ...]
    data: tuple[Any, ...]  # outputs of iterators and queues
    predicates: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of conditionals, with the feeds that they follow from


@dataclass
class TwinStep:
    """The twin of a kind of step and batch shape, or none, and its report."""

    twin: TwinGraph | None
    report: TwinReport
    is_compared: bool = False


class TwinSession:
    """One session of the script."""

    def __init__(self, session: Any, config: GeminiConfig, record: Callable[[TwinReport], None]) -> None:
        import tensorflow.compat.v1 as tf

        self._config, self._record = config, record
        self._servers: Servers = servers_for(config)
        self.mirror = MirrorGraph(session.graph)
        self._builder = TwinBuilder(config, self._servers, self.mirror)
        self._kinds: dict[Any, StepKind] = {}
        self._steps: dict[Any, TwinStep] = {}
        self._predicates: dict[Any, bool] = {}
        self._settings = self._servers.session_settings(session._config)
        self._settings.isolate_session_state = self._servers.is_remote
        _skip_graph_optimizer(self._settings)
        self.sync()
        self.session = tf.Session(self._servers.target, self.mirror.graph, self._settings)
        leave(self.session)
        self._servers.check_devices(self.session)

    # ── graph ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def sync(self) -> None:
        """Mirror what the graph of the script has gained; the stages of new ops follow their costs."""
        notes = notes_of(self.mirror.source)
        if notes and not self._builder.placement.stage_of:
            self._cut(notes)
        elif self.mirror.variables is not None:
            self._follow_updates(self.mirror.variables, notes)
        placement = self._builder.placement
        devices = {name: placement.devices[stage] for name, stage in placement.stage_of.items()}
        self.mirror.sync(devices, placement.stage_of)

    def _cut(self, notes: Sequence[GradientNote]) -> None:
        """Cut the stages of the forward part of all steps, for a batch of nominal size."""
        losses = [loss for note in notes for loss in note.losses]
        sources: dict[str, Any] = {}
        for op in forward_ops(losses, {}) or ():
            if op.type in SOURCES or op.type in ("Placeholder", "PlaceholderWithDefault"):
                sources.update((tensor.name, _nominal_shape(tensor)) for tensor in op.outputs)
        with suppress(SplitRefused):
            facts = forward_facts(losses, sources, self.mirror)
            self._builder.cut(facts)
            if (request := self._builder.shard_request) is not None and not self.mirror.node_of:
                devices = self._builder.placement.shard_devices
                self.mirror.variables = plan_variables(self.mirror.source, facts, notes, request, devices)

    def _follow_updates(self, variables: VariableShards, notes: Sequence[GradientNote]) -> None:
        """Store the new slots of variables in shards as these."""
        graph = self.mirror.source
        whole = {
            name for name, node in self.mirror.node_of.items() if node.op == "VarHandleOp" and name not in variables
        }
        if len(self.mirror.node_of) < len(graph.get_operations()):
            follow_updates(variables, graph, notes, whole)

    # ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def run(
        self, targets: Sequence[Any], fetches: Sequence[Any], feeds: Mapping[Any, Any], options: Any = None,
        metadata: Any = None,
    ) -> list[Any]:  # fmt: skip
        """Return the values of `fetches`."""
        self.sync()
        fed = {key.deref().name if hasattr(key, "deref") else key.name: value for key, value in feeds.items()}
        with self._servers.explained():
            kind = self._kind(targets, fetches, fed)
            names, ops = [tensor.name for tensor in fetches], [op.name for op in targets]
            if kind.notes:
                fed |= self._take_data(kind)
                step = self._step(kind, fed)
                if step.twin is not None:
                    names, ops = self._on_twin(step, targets, fetches, fed)
            last = {
                at for at, one in enumerate(fetches) if has_references() and _is_variable(one) and one.name not in fed
            }
            if not last or not (ops or len(last) < len(names)):
                return self.run_names(names, ops, fed, options, metadata)
            first = [name for at, name in enumerate(names) if at not in last]
            rest = iter(self.run_names(first, ops, fed, options, metadata))
            values = iter(self.run_names([one.name for at, one in enumerate(fetches) if at in last], (), fed))
            return [next(values if at in last else rest) for at in range(len(names))]

    def run_names(
        self, names: Sequence[str], ops: Sequence[str], fed: Mapping[str, Any], options: Any = None,
        metadata: Any = None,
    ) -> list[Any]:  # fmt: skip
        """Run tensors and ops of the mirror by name; return the values of the tensors."""
        graph = self.mirror.graph
        wanted = [name for name in names if name not in fed]
        known = {name: value for name, value in fed.items() if name in names}
        tensors = [graph.get_tensor_by_name(name) for name in wanted]
        operations = [graph.get_operation_by_name(name) for name in ops]
        values = {graph.get_tensor_by_name(name).ref(): value for name, value in fed.items()}
        found = self.session._do_run(None, operations, tensors, values, options, metadata)
        known.update(zip(wanted, found, strict=True))
        return [known[name] for name in names]

    def _kind(self, targets: Sequence[Any], fetches: Sequence[Any], fed: Mapping[str, Any]) -> StepKind:
        key = (
            tuple(tensor.name for tensor in fetches), tuple(op.name for op in targets), tuple(sorted(fed)),
            self.mirror.source.version,
        )  # fmt: skip
        if key not in self._kinds:
            reached = reach_ops([*(tensor.op for tensor in fetches if tensor.name not in fed), *targets], fed)
            notes = tuple(
                note for note in notes_of(self.mirror.source) if any(one.op in reached for one in note.tensors)
            )
            data = tuple(tensor for op in reached if op.type in SOURCES for tensor in op.outputs)
            self._kinds[key] = StepKind(notes, data, self._find_predicates(notes, fed))
        return self._kinds[key]

    def _find_predicates(
        self, notes: Sequence[GradientNote], fed: Mapping[str, Any]
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the predicates of conditionals that follow from feeds and constants alone."""
        found = {}
        for op in forward_ops([loss for note in notes for loss in note.losses], fed) or ():
            if op.type in CONDITIONALS and self.mirror.op(op.name).type not in CONDITIONALS:
                predicate = op.inputs[0]
                before = reach_ops([] if predicate.name in fed else [predicate.op], fed)
                if not any(one.op_def.is_stateful and not one.type.startswith("Placeholder") for one in before):
                    read = {predicate.name, *(tensor.name for one in before for tensor in one.inputs)}
                    read |= {tensor.name for one in before for tensor in one.outputs}
                    found[predicate.name] = tuple(sorted(read & fed.keys()))
        return tuple(found.items())

    def _take_branches(self, kind: StepKind, fed: Mapping[str, Any]) -> dict[str, bool]:
        """Return the values of predicates in a step."""
        taken = {}
        for name, feeds in kind.predicates:
            key = (name, *(np.asarray(fed[one]).tobytes() for one in feeds))
            if key not in self._predicates:
                self._predicates[key] = bool(fed[name] if name in fed else self.run_names([name], (), fed)[0])
            taken[name] = self._predicates[key]
        return taken

    def _take_data(self, kind: StepKind) -> dict[str, Any]:
        """Run the ops that consume data once, and return what they gave."""
        names = [tensor.name for tensor in kind.data]
        return dict(zip(names, self.run_names(names, (), {}), strict=True)) if names else {}

    def _on_twin(
        self, step: TwinStep, targets: Sequence[Any], fetches: Sequence[Any], fed: dict[str, Any]
    ) -> tuple[list[str], list[str]]:
        """Return the names to run on the twin; the first time, its results are compared."""
        twin = step.twin
        if twin is None:
            raise GraphError("no twin")
        sizes = twin.pieces.random_shapes
        comparison = None
        try:
            names, ops = twin.resolve(fetches, targets)
            if not step.is_compared:
                taken = twin.find_boundary(names, ops) if twin.plan.untouched else ()
                random, comparison = compare_steps(self, twin, {**fed, **sizes}, taken)
        except SplitRefused as refused:
            self._refuse(step, str(refused))
            return [tensor.name for tensor in fetches], [op.name for op in targets]
        if comparison is not None:
            step.is_compared = True
            step.report = replace(step.report, comparison=comparison)
            fed |= random
            if reason := comparison.fault:
                self._refuse(step, reason)
                return [tensor.name for tensor in fetches], [op.name for op in targets]
            self._record(step.report)
        fed |= {name: value for name, value in sizes.items() if name not in fed}
        return names, ops

    # ── twins ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _step(self, kind: StepKind, fed: Mapping[str, Any]) -> TwinStep:
        shapes = tuple((name, np.shape(value)) for name, value in sorted(fed.items()))
        taken = self._take_branches(kind, fed)
        key = (tuple(map(id, kind.notes)), shapes, tuple(taken.items()))
        if key not in self._steps:
            self._steps[key] = self._build(kind, fed, taken)
        return self._steps[key]

    def _build(self, kind: StepKind, fed: Mapping[str, Any], taken: Mapping[str, bool]) -> TwinStep:
        report = TwinReport(kind.notes[0].losses[0].name, batch_text(map(np.shape, fed.values())))
        try:
            facts, sources = self._facts(kind, fed, taken)
            return TwinStep(*self._builder.build(kind.notes, facts, sources, fed, report))
        except SplitRefused as refused:
            step = TwinStep(None, report)
            self._refuse(step, str(refused))
            return step

    def _facts(
        self, kind: StepKind, fed: Mapping[str, Any], taken: Mapping[str, bool]
    ) -> tuple[ForwardFacts, dict[str, BatchSource]]:
        losses = [loss for note in kind.notes for loss in note.losses]
        ops = forward_ops(losses, fed) or ()
        used = {tensor.name: tensor for op in ops for tensor in op.inputs if tensor.name in fed}
        sources = {name: BatchSource(np.shape(fed[name]), _declared(tensor)) for name, tensor in sorted(used.items())}
        shapes = {name: source.shape for name, source in sources.items()}
        return forward_facts(losses, shapes, self.mirror, taken), sources

    def _refuse(self, step: TwinStep, reason: str) -> None:
        step.twin = None
        step.report = replace(step.report, reason=reason)
        if self._config.strict:
            raise GraphError(f"{step.report.line}\n    → strict=False runs it on one device")
        self._record(step.report)

    def close(self) -> None:
        """Close the session on the mirror."""
        self.session.close()


def _skip_graph_optimizer(settings: Any) -> None:
    """Turn TensorFlow's rewriting of graphs off, unless the script configures it.

    It takes most of the time of the first run of every set of fetches, and finds little in ops of known shapes.
    """
    rewriting = settings.graph_options.rewrite_options
    if not rewriting.ListFields():
        rewriting.disable_meta_optimizer = True


def _is_variable(tensor: Any) -> bool:
    """Whether a tensor is what a session fetches for a variable."""
    op = tensor.op
    return bool(op.type == "ReadVariableOp" and op.name == op.inputs[0].op.name + "/Read/ReadVariableOp")


def _declared(tensor: Any) -> list[int | None] | None:
    return tensor.shape.as_list() if tensor.shape.rank is not None else None


def _nominal_shape(tensor: Any) -> tuple[int, ...]:
    sizes = _declared(tensor)
    return () if sizes is None else tuple(_NOMINAL if size is None else size for size in sizes)
