"""Call sizes: calls of one kind with sizes that no earlier call had.

plan           from two plans of the kind that differ in sizes alone (`gemini.planner.resized_plan`), else a new one
output spec    that of another size, with the sizes of this graph: the first call of a size need not run locally
audit          the first sizes, and later each that lies beyond twice the range so far, are compared with a local run
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.ir.call_binding import ModelCall
from gemini.ir.graph import Graph
from gemini.ir.pytree import Literal, Number, Ref, leaves
from gemini.planner.free_sizes import resize_strides
from gemini.planner.plan_reuse import describe_nodes
from gemini.planner.resized_plan import PlanPair
from gemini.runtime.deferred.contract import OutputSpec

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.call_signature import CallKind

_AUDITED = 3  # sizes that are compared at first: rules of sizes are learned from two
MOST_RESIZED = 64  # resized kinds per kind of call; beyond that, the oldest is dropped
_PAIRED = 4  # kinds that are compared with each other


@dataclass
class SizeFamily:
    """What is known about the sizes of calls of one kind: pairs of plans, and audited sizes."""

    pairs: dict[tuple[int, int], PlanPair | None] = field(default_factory=dict)  # by identity of the plans
    sound: list[PlanPair] = field(default_factory=list)  # pairs whose rules were checked at further sizes
    audited: dict[Hashable, list[tuple[int, ...]]] = field(default_factory=dict)  # by loss: sizes
    outputs: list[tuple[Graph, OutputSpec]] = field(default_factory=list)  # observed
    is_fixed: bool = False  # a resized plan has failed

    def find_plan(
        self, model: nn.Module, kinds: Sequence[CallKind], call: ModelCall, micro_batches: int
    ) -> tuple[CallKind, Any] | None:
        """Return a plan for the sizes of a call, and the kind whose stages it runs; None where it needs its own."""
        if self.is_fixed:
            return None
        shapes = [tuple(tensor.shape) for tensor in call.tensors]
        own = [kind for kind in kinds if kind.plan is not None and kind.origin is None][-_PAIRED:]
        for one, other in combinations(own, 2):
            if other.plan is not None and other.plan.shards is not None:
                one, other = other, one  # the layouts of a later plan leave whole what varies
            pair = self._pair(one, other)
            plan = None if pair is None else pair.resize(model, *call.with_tensors(call.tensors), shapes)
            if pair is None or plan is None or not plan.can_split(plan.batch.size, micro_batches):
                continue
            if not self._is_sound(pair, model, call, shapes):
                self.pairs[id(one.plan), id(other.plan)] = None
                continue
            return one, plan
        return None

    def _is_sound(self, pair: PlanPair, model: nn.Module, call: ModelCall, shapes: Sequence[tuple[int, ...]]) -> bool:
        if pair not in self.sound and pair.is_sound(model, call.with_tensors(call.tensors), shapes):
            self.sound.append(pair)
        return pair in self.sound

    def _pair(self, one: CallKind, other: CallKind) -> PlanPair | None:
        assert one.plan is not None
        assert other.plan is not None
        key = id(one.plan), id(other.plan)
        held = self.pairs.get(key)
        if key not in self.pairs or (held is not None and held.plan is not one.plan):
            self.pairs[key] = PlanPair.of(one.plan, one.shapes, other.plan, other.shapes)
        return self.pairs[key]

    # ── outputs ────────────────────────────────────────────────────────────────────────────────────────────────────
    def learn_outputs(self, graph: Graph, spec: OutputSpec) -> None:
        """Record the observed output spec of a call by a graph."""
        if len(self.outputs) < _PAIRED:
            self.outputs.append((graph, spec))

    def find_output_spec(self, graph: Graph, samples: int) -> OutputSpec | None:
        """Return the output spec of calls with `samples` by a graph, if an observed one tells it."""
        for seen, spec in self.outputs:
            if seen is graph or describe_nodes(seen) == describe_nodes(graph):
                found = resize_output_spec(spec, seen, graph, samples)
                if found is not None:
                    return found
        return None

    # ── audit ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def is_audited(self, loss: Hashable, sizes: tuple[int, ...]) -> bool:
        """Return whether steps with this loss need no comparison at these sizes."""
        known = self.audited.get(loss, [])
        if sizes in known:
            return True
        if len(known) < _AUDITED:
            return False
        return all(
            min(seen) <= 2 * size and size <= 2 * max(seen) for seen, size in zip(zip(*known), sizes, strict=True)
        )

    def add_audited(self, loss: Hashable, sizes: tuple[int, ...]) -> None:
        """Record that a step with this loss was compared at these sizes."""
        known = self.audited.setdefault(loss, [])
        if sizes not in known:
            known.append(sizes)


def sizes_of(tensors: Iterable[Any]) -> tuple[int, ...]:
    """Return all sizes of the tensors of a call."""
    return tuple(size for tensor in tensors for size in tensor.shape)


def outline_of(tape: Tape, root: int) -> Hashable:
    """Return a key that is equal for losses which differ in sizes alone."""
    metas = tuple((len(meta.shape), meta.dtype, meta.requires_grad) for meta in tape.metas)
    ops = tuple((op.function, _without_sizes(op.form), op.region, op.results, op.writes) for op in tape.ops)
    return root, tape.outputs, metas, tuple(tape.operands), ops


def _without_sizes(form: Any) -> tuple[Any, ...]:
    """Return the leaves of a form, whole numbers by their type alone."""
    return tuple(
        int if isinstance(leaf, Literal) and type(leaf.value) is int else leaf
        if not isinstance(leaf, Literal)
        else (type(leaf.value), repr(leaf.value))
        for leaf in leaves(form)
    )  # fmt: skip


def may_hold_sizes(plan: StepPlan) -> bool:
    """Return whether a model may keep tensors that it has made for the sizes of a call, outside its parameters."""
    return bool(plan.attribute_writes) or any(
        node.kind == "attribute" or (node.kind == "buffer" and meta.batch_dim is not None)
        for node in plan.graph.nodes
        for meta in node.outputs.values()
    )


# ── outputs ────────────────────────────────────────────────────────────────────────────────────────────────────────
def resize_output_spec(spec: OutputSpec, seen: Graph, graph: Graph, samples: int) -> OutputSpec | None:
    """Return the output spec of calls with `samples` by `graph`, from that of calls by `seen`; None if unknown."""
    outputs = graph.outputs()
    if graph.result != seen.result or len(outputs) != len(spec.metas) or _returns_numbers(graph):
        return None
    metas = [_resize_meta(meta, graph, ref, samples) for meta, ref in zip(spec.metas, outputs, strict=True)]
    found = tuple(meta for meta in metas if meta is not None)
    return replace(spec, metas=found) if len(found) == len(metas) else None


def _returns_numbers(graph: Graph) -> bool:
    """Return whether an output contains numbers that are computed in every call, from sizes or contents."""
    return any(isinstance(leaf, Number) for leaf in leaves(graph.result))


def _resize_meta(meta: Meta, graph: Graph, ref: Ref, samples: int) -> Meta | None:
    value = graph.meta(ref)
    same = value.dtype == str(meta.dtype).removeprefix("torch.") and value.requires_grad == meta.requires_grad
    if not same or value.batch_factor == 0 or len(value.shape) != len(meta.shape):  # growth with the batch is unknown
        return None
    shape = list(value.shape)
    if value.batch_dim is not None:
        shape[value.batch_dim] = samples * value.batch_factor
    strides = None if meta.strides is None else resize_strides(meta.shape, meta.strides, shape)
    if meta.strides is not None and strides is None:
        return None
    return replace(meta, shape=tuple(shape), strides=strides)
