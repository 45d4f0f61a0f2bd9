"""Local graph: the graph that every shard runs, from a captured graph and its shard plan.

Each node becomes its local op. Between a value and the readers that want it in another layout stands a move, made once
per version; sizes that count entries of a divided dimension become those of the shard:

    %3 = fc1(%2)                            %3 = linear(%2, fc1.weight, fc1.bias)       slices of weight and bias
    %4 = view(%3, 8, 16, 12, 64)      ──►   %4 = view(%3, 8, 16, shard_size(12, 2), 64)
    …                                       …
    %9 = fc2(%8)                            %9 = linear(%8, fc2.weight)                 a sum
    %10 = add(%9, %1)                       %10 = move(%9, Partial(), Replicate())
                                            %11 = add(%10, %1)

All shards run the same graph: the number of the shard is known only when it runs. A parameter that is held in slices of
several groups has one dimension more (`parameter_slice`), which the graph flattens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from gemini.errors import ShardingError
from gemini.ir.def_use import rewrite_refs, tensor_reads
from gemini.ir.graph import Graph
from gemini.ir.node import EMPTY_KWARGS, MODULES, Guard, Node, TensorMeta
from gemini.ir.pytree import Literal, MappingForm, Number, Path, Ref, SequenceForm
from gemini.ir.symint import ARITHMETIC, Expr
from gemini.tensor_parallel.divided_graph import MOVE, LocalGraph
from gemini.tensor_parallel.divided_sizes import divide_size
from gemini.tensor_parallel.layer_functions import layer_function
from gemini.tensor_parallel.layouts import (
    REPLICATE,
    Layout,
    Replicate,
    Shard,
    local_size,
    unit_count,
    unit_range,
    value_part,
)
from gemini.tensor_parallel.layouts import conversions as conversions_of
from gemini.tensor_parallel.node_ports import overwritten_values
from gemini.tensor_parallel.shard_plan import (
    DIVIDED_HEADS,
    DIVIDED_RECURRENCE,
    SAME,
    VOCABULARY_CROSS_ENTROPY,
    VOCABULARY_EMBEDDING,
    NodeShards,
    ShardPlan,
)

_VOCABULARY = {
    VOCABULARY_EMBEDDING: "gemini.collectives.vocabulary_ops.vocabulary_embedding",
    VOCABULARY_CROSS_ENTROPY: "gemini.collectives.vocabulary_ops.vocabulary_cross_entropy",
}

_Key = tuple[Ref | str, int]  # a value or the first name of a parameter, and the stage: -1 where stages share versions


def local_graph(graph: Graph, plan: ShardPlan, stage_of: Mapping[int, int], single: Collection[int] = ()) -> LocalGraph:
    """Return the graph of a shard; raises ShardingError where a node has no local form.

    The stages `single` run on one worker: they exchange nothing.
    """
    return _Localizer(graph, plan, stage_of, single).build()


def parameter_slice(whole: torch.Tensor, layout: Layout, count: int, shard: int) -> torch.Tensor:
    """Return the part of a parameter that a shard holds, a view; one dimension more where it has several groups."""
    if not isinstance(layout, Shard):
        return whole
    units = unit_count(layout, whole.shape[layout.dim])
    start, stop = (at * layout.factor for at in unit_range(units, count, shard))
    if layout.outer == 1:
        return whole.narrow(layout.dim, start, stop - start)
    return whole.unflatten(layout.dim, (layout.outer, -1)).narrow(layout.dim + 1, start, stop - start)


class _Localizer:
    def __init__(self, graph: Graph, plan: ShardPlan, stage_of: Mapping[int, int], single: Collection[int]) -> None:
        self.graph, self.plan, self.stage_of, self.single = graph, plan, stage_of, single
        self.model = graph.bound_model()
        self.nodes: list[Node] = []
        self.stages: list[list[int]] = [[] for _ in range(1 + max(stage_of.values(), default=0))]
        self.node_of: dict[int, int] = {}
        self.moved: dict[int, Ref] = {}
        self.recomputed = 0  # the checkpoint of the node that is converted
        self.made: dict[tuple[_Key, Layout], Ref] = {}
        self.overwritten = overwritten_values(graph)
        self.memory: dict[int, int] = {}  # of values that ops write to, and that are moved before
        self.held: dict[str, Ref] = {}  # parameters as they are stored
        self.wanted: dict[_Key, dict[Layout, int]] = defaultdict(dict)  # layouts, with the first stage that reads them
        for one in plan.nodes:
            self._note_wanted(one)
        for ref, _ in plan.results:
            self._want(ref, self.plan.produced(ref), stage_of.get(ref.node, 0))
            self._want(ref, REPLICATE, stage_of.get(ref.node, 0))

    # ── versions ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _note_wanted(self, one: NodeShards) -> None:
        if self.graph.nodes[one.node].is_source:
            return
        stage = self.stage_of[one.node]
        for ref, layout in one.inputs:
            self._want(ref, layout, stage)
        for name, layout in one.parameters:
            self._want(self.plan.tensor(name).name, layout, stage)

    def _want(self, what: Ref | str, layout: Layout, stage: int) -> None:
        found = self.wanted[self._key(what, stage)]
        found[layout] = min(stage, found.get(layout, stage))

    def _key(self, what: Ref | str, stage: int) -> _Key:
        """Return what versions are shared by: stages never send tensors of the model, or arguments, to each other."""
        if isinstance(what, str):
            return what, stage
        node = self.graph.nodes[what.node]
        if node.kind == "parameter":
            return self.plan.tensor(node.target).name, stage
        return what, stage if node.is_source else -1

    def _facts(self, what: Ref | str) -> tuple[Layout, bool]:
        """Return the layout in which a value is made or stored, and whether it has a gradient."""
        if isinstance(what, str):
            tensor = self.plan.tensor(what)
            return tensor.layout, tensor.trainable
        return self.plan.produced(what), what in self.plan.grads

    def version(self, what: Ref | str, want: Layout, stage: int, scope: tuple[str, ...] = ()) -> Ref:
        """Return a value in a layout, converted where it is not made in this one."""
        key = self._key(what, stage)
        if (key, want) in self.made:
            return self.made[key, want]
        have, grad = self._facts(key[0])
        wanted = self.wanted[key]
        pairs = conversions_of(have, (*wanted, want), grad)
        source = next((first for first, second in pairs if second == want), have)
        if want == have or (not grad and value_part(source) == value_part(want)):
            found = self._base(key[0])
            if want == have and isinstance(key[0], str) and isinstance(have, Shard) and have.outer > 1:
                found = self._flattened(found, have, stage, scope)
        else:
            before = self.version(key[0], source, stage, scope)
            at = stage if key[1] >= 0 else min(wanted.get(one, stage) for one in self._descendants(want, pairs))
            if key[1] < 0 and at in self.single:
                at = self.stage_of[key[0].node]  # type: ignore[union-attr]  # shards make it, or nothing moves
            args = (before, Literal(source), Literal(want), *self._units(key[0], source, want))
            found = self._add(self._conversion(MOVE, args, key[0], want, scope, grad), at)
            if isinstance(what, Ref) and what in self.overwritten:
                self.memory[what.node] = found.node
            if isinstance(key[0], Ref):
                self.moved[found.node] = key[0]
        self.made[key, want] = found
        return found

    def _descendants(self, want: Layout, pairs: list[tuple[Layout, Layout]]) -> list[Layout]:
        return [want, *(second for first, second in pairs if first == want)]

    def _units(self, what: Ref | str, source: Layout, want: Layout) -> tuple[Literal, ...]:
        """Return the number of units of a divided dimension where shards have different numbers."""
        layout = source if isinstance(source, Shard) else want
        if not isinstance(layout, Shard):
            return ()
        shape = self._meta(what).shape
        units = unit_count(layout, shape[layout.dim])
        return (Literal(units),) if units % self.plan.size else ()

    def _base(self, what: Ref | str) -> Ref:
        """Return a value as it is made or stored."""
        if isinstance(what, Ref):
            return Ref(self.node_of[what.node], what.source, what.path)
        if what not in self.held:
            node = Node(0, "parameter", what, what, outputs={("ret", ()): self._stored_meta(what)})
            self.held[what] = self._add(node, None)
        return self.held[what]

    def _flattened(self, ref: Ref, layout: Shard, stage: int, scope: tuple[str, ...]) -> Ref:
        name = self.nodes[ref.node].target
        args = (ref, Literal(layout.dim), Literal(layout.dim + 1))
        return self._add(self._conversion("torch.Tensor.flatten", args, name, layout, scope, grad=True), stage)

    def _conversion(  # noqa: PLR0917
        self, target: str, args: tuple[Any, ...], what: Ref | str, layout: Layout, scope: tuple[str, ...], grad: bool
    ) -> Node:
        meta = self._meta(what)
        local = replace(meta, shape=local_size(layout, meta.shape, self.plan.size, 0), strides=None)
        maker = None if isinstance(what, str) else self.graph.nodes[what.node]
        name = what if isinstance(what, str) else self.graph.nodes[what.node].name
        return Node(
            0, "op", f"{name} → {target.rpartition('.')[2]}", target, SequenceForm(tuple, args), EMPTY_KWARGS,
            region=None if maker is None else maker.region, scope=scope, recomputed=self.recomputed,
            outputs={("ret", ()): replace(local, requires_grad=grad)},
        )  # fmt: skip

    def _meta(self, what: Ref | str) -> TensorMeta:
        if isinstance(what, Ref):
            return self.graph.meta(what)
        tensor = self.model.get_parameter(what)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorMeta(tuple(tensor.shape), dtype, str(tensor.device), tensor.requires_grad)

    def _stored_meta(self, name: str) -> TensorMeta:
        layout, meta = self.plan.tensor(name).layout, self._meta(name)
        return replace(meta, shape=local_size(layout, meta.shape, self.plan.size, 0))

    def _add(self, node: Node, stage: int | None) -> Ref:
        node.id = len(self.nodes)
        self.nodes.append(node)
        if stage is not None:
            self.stages[stage].append(node.id)
        return Ref(node.id)

    # ── nodes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def build(self) -> LocalGraph:
        """Return the graph."""
        guards: list[Guard] = []
        at_position = self.graph.guards_at()
        for node in self.graph.nodes:
            self.recomputed = node.recomputed
            guards += self._guards(at_position.get(node.id, ()))
            self._node(node)
        end, self.recomputed = len(self.graph.nodes), 0
        guards += self._guards(guard for at, found in sorted(at_position.items()) if at >= end for guard in found)
        result = rewrite_refs(self.graph.result, self._result, lambda number: self._number(number, 0))
        graph = replace(
            self.graph,
            nodes=self.nodes,
            guards=guards,
            inputs={self.node_of[node]: path for node, path in self.graph.inputs.items()},
            result=result,
            pins=tuple(self.node_of[node] for node in self.graph.pins),
            variants=None,
        )
        return LocalGraph(graph, tuple(map(tuple, self.stages)), self.node_of, self.moved)

    def _result(self, ref: Any) -> Any:
        return self.version(ref, REPLICATE, self.stage_of.get(ref.node, 0)) if isinstance(ref, Ref) else ref

    def _guards(self, guards: Iterable[Guard]) -> Iterator[Guard]:
        """Yield guards on the local values; one on the size of a divided dimension is fixed by the plan."""
        for guard in guards:
            expr = self._expr(guard.expr, 0)
            if isinstance(expr, Expr) and any(True for _ in tensor_reads(expr)):
                yield replace(guard, expr=expr, position=len(self.nodes))

    def _node(self, node: Node) -> None:
        if node.kind == "parameter":
            self.node_of[node.id] = self._base(self.plan.tensor(node.target).name).node
            return
        if node.is_source:
            self.node_of[node.id] = self._add(replace(node), None).node
            return
        one, stage = self.plan.node(node.id), self.stage_of[node.id]
        wants = dict(one.inputs)

        def read(ref: Any) -> Any:
            return self.version(ref, wants[ref], stage, node.scope) if isinstance(ref, Ref) else ref

        args, kwargs = (rewrite_refs(form, read, lambda number: self._number(number, stage))
                        for form in (node.args, node.kwargs))  # fmt: skip
        made = self._local_form(replace(node, args=args, kwargs=kwargs), one, stage)
        made = replace(
            made,
            outputs=self._local_outputs(node, one),
            mutates=tuple(self.version(ref, wants[ref], stage) for ref in node.mutates),
            after=tuple(self.node_of[at] for at in node.after),
            shares=tuple(self.memory.get(at, self.node_of[at]) for at in node.shares),
        )
        self.node_of[node.id] = self._add(made, stage).node

    def _local_outputs(self, node: Node, one: NodeShards) -> dict[tuple[str, Path], TensorMeta]:
        layouts = {(ref.source, ref.path): layout for ref, layout in one.outputs}
        return {
            at: replace(meta, shape=local_size(layouts[at], meta.shape, self.plan.size, 0), strides=None)
            if isinstance(layouts.get(at), Shard) else meta
            for at, meta in node.outputs.items()
        }  # fmt: skip

    def _local_form(self, node: Node, one: NodeShards, stage: int) -> Node:
        """Return a node as a shard runs it; a module that reads slices is the function that it calls."""
        sizes = [(size.place, size.units) for size in one.sizes]
        if node.kind in MODULES and not self._is_whole(one):
            module = self.model.get_submodule(node.target)
            call = None if node.kind == "block" else layer_function(
                module, node.args, node.kwargs, lambda name: self._weight(node, one, name, stage))  # fmt: skip
            if call is None:
                raise ShardingError(f"{node.name} ({node.cls or node.kind}) reads slices, and has no local form")
            node = replace(node, kind="op", target=call.target, args=call.args, kwargs=call.kwargs, cls="", uses=())
            sizes = [(call.place_of(place), units) for place, units in sizes]
        for place, units in sizes:
            args, kwargs = divide_size(node.args, node.kwargs, place, units, node)
            node = replace(node, args=args, kwargs=kwargs)
        if one.local == DIVIDED_RECURRENCE:
            return replace(node, kwargs=MappingForm(dict, (("units", Literal(self._weight_units(one))),)))
        if one.local == DIVIDED_HEADS:
            return replace(node, target="gemini.collectives.attention_ops.divided_multi_head_attention")
        return node if one.local == SAME else self._vocabulary_op(node, one)

    def _weight(self, node: Node, one: NodeShards, name: str, stage: int) -> Ref | None:
        """Return the version of a parameter that a module reads."""
        full = f"{node.target}.{name}" if node.target else name
        layout = dict(one.parameters).get(full)
        return None if layout is None else self.version(self.plan.tensor(full).name, layout, stage, node.scope)

    def _weight_units(self, one: NodeShards) -> int:
        """Return the units of the first divided parameter that a module reads."""
        found = ((self.plan.tensor(name).shape, layout) for name, layout in one.parameters)
        return next(unit_count(layout, shape[layout.dim]) for shape, layout in found if isinstance(layout, Shard))

    def _vocabulary_op(self, node: Node, one: NodeShards) -> Node:
        pairs = [(self.graph.meta(ref).shape, layout) for ref, layout in one.inputs]
        pairs += [(self.plan.tensor(name).shape, layout) for name, layout in one.parameters]
        shape, layout = next((shape, layout) for shape, layout in pairs if isinstance(layout, Shard))
        given = (("entries", Literal(shape[layout.dim])), ("layout", Literal(layout)))
        kwargs = MappingForm(dict, (*getattr(node.kwargs, "items", ()), *given))
        return replace(node, target=_VOCABULARY[one.local], kwargs=kwargs)

    def _is_whole(self, one: NodeShards) -> bool:
        """Return whether a module reads its parameters as they are stored, whole."""
        stored = [(self.plan.tensor(name).layout, want, self.plan.tensor(name).trainable)
                  for name, want in one.parameters]  # fmt: skip
        same = all(have == want or (not grad and value_part(have) == value_part(want)) for have, want, grad in stored)
        is_cut = any(isinstance(have, Shard) for have, _, _ in stored)
        return same and not is_cut and one.local == SAME and not one.sizes

    # ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _number(self, number: Number, stage: int) -> Any:
        expr = self._expr(number.expr, stage)
        return Number(expr) if isinstance(expr, Expr) else Literal(expr)

    def _expr(self, expr: Any, stage: int) -> Any:
        """Return a number that means the same on every shard: a size is that of the whole value."""
        if not isinstance(expr, Expr):
            return expr
        if expr.op in ARITHMETIC:
            return Expr(expr.op, tuple(self._expr(part, stage) for part in expr.operands))
        if expr.op == "call":
            name, *forms = expr.operands
            return Expr("call", (name, *(rewrite_refs(one, lambda ref: self._whole(ref, stage)) for one in forms)))
        ref, *rest = expr.operands
        layout = self.plan.produced(ref)
        if expr.op not in ("size", "numel", "stride", "storage_offset"):
            return Expr(expr.op, (self._whole(ref, stage), *rest))
        if isinstance(layout, Shard):
            shape = self.graph.meta(ref).shape
            if expr.op == "numel":
                sizes = [self._expr(Expr("size", (ref, dim)), stage) for dim in range(len(shape))]
                return reduce(lambda one, other: Expr("mul", (one, other)), sizes)
            if expr.op != "size" or not rest:
                raise ShardingError(f"a number depends on the {expr.op} of {ref}, which is divided")
            if rest[0] % len(shape) == layout.dim:
                return shape[layout.dim]
        node = self.graph.nodes[ref.node]
        name = self.plan.tensor(node.target).name if node.kind == "parameter" else ref
        return Expr(expr.op, (self.version(name, layout, stage), *rest))

    def _whole(self, ref: Any, stage: int) -> Any:
        """Return a value of which contents are read: the version that is whole."""
        if not isinstance(ref, Ref):
            return ref
        have, _ = self._facts(ref if self.graph.nodes[ref.node].kind != "parameter" else self._key(ref, stage)[0])
        return self.version(ref, have if isinstance(value_part(have), Replicate) else REPLICATE, stage)
