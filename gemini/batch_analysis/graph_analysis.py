"""Graph analysis: the batch kinds of all values of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gemini.batch_analysis.analysis_steps import AnalysisStep, InheritedRefusal
from gemini.batch_analysis.batch_counts import number_at, number_kind
from gemini.batch_analysis.batch_kinds import Kind, Opaque, PerMicroBatch, Replicate, Shard, SortedRows
from gemini.batch_analysis.batchnorm import can_use_micro_batch_statistics
from gemini.batch_analysis.op_call import (
    SAMPLES,
    AnalysisRefused,
    ResultMeta,
    SampleCount,
    TensorValue,
    UnknownNumber,
    leaves,
)
from gemini.batch_analysis.precompute import precomputable_nodes
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.rolled_graphs import settle_branches
from gemini.batch_analysis.rules.registry import short_name
from gemini.batch_analysis.side_effects import find_obstacle
from gemini.capture.attribute_writes import ASSIGN
from gemini.capture.graph_guards import early_guards, finite_check_operand
from gemini.capture.trace_state import BRANCHES_ON_RESULTS
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import decode, follow
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Guard, Node, TensorMeta
from gemini.ir.pytree import Ref, expr_refs


@dataclass
class GraphKinds:
    """The batch kinds of all values of a graph."""

    graph: Graph
    interpreter: KindInterpreter
    order: tuple[int, ...] = ()  # input nodes, in the order of the call's tensors
    own_statistics: tuple[str, ...] = ()  # modules that use the statistics of each micro-batch
    least: int = 1  # the fewest samples of a micro-batch
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why nothing may be split; '' if that depends on the value."""
        return self.interpreter.blocked

    def kind(self, ref: Ref) -> Kind:
        """Return the kind of a value."""
        if self.reason:
            return Opaque(self.reason)
        value = self.interpreter.values.get(ref)
        if value is not None and isinstance(value.kind, PerMicroBatch):
            return Opaque(f"{self.graph.nodes[ref.node].name} is an element of a list with one entry per sample")
        if value is not None and isinstance(value.kind, SortedRows):
            return Opaque(f"{self.graph.nodes[ref.node].name} has rows that were not restored to their order")
        return value.kind if value is not None else Opaque(f"{self.graph.nodes[ref.node].name} was not analysed")

    def inputs(self) -> tuple[int | None, ...]:
        """Return the batch dimension of every input."""
        return tuple(None if place is None else place.dim for place in self.places())

    def places(self) -> tuple[Shard | None, ...]:
        """Return how every input is sharded."""
        kinds = [self.kind(Ref(index)) for index in self.order]
        return tuple(kind if isinstance(kind, Shard) else None for kind in kinds)


def prove_graph(
    graph: Graph,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    least: int = 1,
    *,
    micro_batch_statistics: bool = False,
    memo: dict[Any, Any] | None = None,
) -> GraphKinds:
    """Propagate batch kinds through a graph. With a call, its tensors determine the order of the inputs.

    `least`: the fewest samples of a micro-batch. `micro_batch_statistics`: batch normalization may use those of
    each micro-batch. `memo`: known results of leaves (`keep_equal_leaves`).
    """
    modules = {
        node.target: graph.bound_model().get_submodule(node.target) for node in graph.nodes if node.kind == "module"
    }
    own = tuple(
        name for name, module in modules.items() if micro_batch_statistics and can_use_micro_batch_statistics(module)
    )
    forms = GraphKinds(
        graph,
        KindInterpreter(least=least, micro_batch_statistics=micro_batch_statistics),
        _input_order(graph, args, kwargs),
        own,
        least,
        {} if memo is None else memo,
    )
    forms.interpreter.blocked = _obstacle(graph)
    if forms.reason:
        return forms
    statements = [statement_of(graph, node, forms.memo) for node in graph.nodes]
    bound = None if args is None and kwargs is None else bind(graph.bound_model(), args or (), kwargs or {})
    ahead = forms.interpreter.precomputable = precomputable_nodes(graph, bound)
    for node, statement in zip(graph.nodes, statements, strict=True):
        if not node.is_source:
            makes = all(key.node == node.id for key, _ in statement.results)  # not `x[i] = y`, whose result is x
            statement.known, statement.pure = node.id in ahead and makes, makes
    forms.interpreter.is_rolled = bool(graph.rolled)
    forms.interpreter.extend(statements)
    settle_guards(forms.interpreter, graph)
    settle_assignments(forms.interpreter, graph)
    if graph.rolled:  # last: a repeated analysis of a write clears the block that it caused
        forms.interpreter.blocked = forms.interpreter.blocked or settle_branches(forms.interpreter, graph, bound)
    return forms


def settle_assignments(interpreter: KindInterpreter, graph: Graph) -> None:
    """Block a graph that assigns per-micro-batch values to attributes, which must end with the whole-batch state."""
    for node in graph.nodes:
        if node.target != ASSIGN:
            continue
        for leaf in leaves(decode(node.args, interpreter.read)):
            varies = isinstance(leaf, (SampleCount, UnknownNumber)) or (
                isinstance(leaf, TensorValue) and not leaf.is_constant
            )
            if varies and not interpreter.blocked:
                interpreter.blocked = f"{node.name} stores data of the batch in an attribute"


def _input_order(graph: Graph, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> tuple[int, ...]:
    if args is None and kwargs is None:
        return tuple(graph.inputs)
    bound = bind(graph.bound_model(), args or (), kwargs or {})
    nodes = {id(follow(bound, path)): node for node, path in graph.inputs.items()}
    return tuple(nodes[id(tensor)] for tensor in ModelCall(args or (), kwargs or {}).tensors if id(tensor) in nodes)


def _obstacle(graph: Graph) -> str:
    """Return what prevents a graph from being split at all; '' if nothing."""
    if graph.is_whole:
        return f"the model was captured as one opaque node: {graph.blocks['']}"
    if graph.batch_size is None:
        held = graph.checked.get("half batch", "")
        return f"its Python depends on the number of samples ({held})" if held else "no input counts samples"
    if not any(meta.batch_dim is not None for node in graph.nodes for meta in node.outputs.values()):
        return "no input counts samples"
    return find_obstacle(graph)


def settle_guards(interpreter: KindInterpreter, graph: Graph) -> None:
    """Make branches on contents agree in all micro-batches: replace the values they read by the whole batch's."""
    settled = {id(guard) for guard in early_guards(graph).guards} if graph.rolled else set()  # conditions cover them
    for guard in graph.guards:
        if not guard.data or id(guard) in settled or _asks_every_sample(interpreter, graph, guard):
            continue
        for ref in expr_refs(guard.expr):
            value = interpreter.values.get(ref)
            if value is not None and isinstance(value.kind, PerMicroBatch):
                continue  # each micro-batch evaluates it, and each stage checks the outcome
            if value is None or (not value.is_constant and not interpreter.demand(ref, "whole")):
                why = value.kind.reason if value is not None and isinstance(value.kind, Opaque) else ""
                reason = f"a branch depends on the contents of the batch ({guard.line}) {why}".strip()
                interpreter.blocked = interpreter.blocked or reason
                return


def _asks_every_sample(interpreter: KindInterpreter, graph: Graph, guard: Guard) -> bool:
    """Return whether a branch tests that all numbers are finite: then micro-batches decide for the whole batch."""
    ref = finite_check_operand(graph.nodes, guard.expr, guard.expected)
    value = None if ref is None else interpreter.values.get(ref)
    return value is not None and isinstance(value.kind, (Shard, Replicate))


def find_size_branch(interpreter: KindInterpreter, graph: Graph, samples: int) -> str:
    """Return the first branch on sizes whose outcome differs between whole batch and micro-batch; '' if none."""
    for guard in graph.guards if not graph.rolled else ():  # compared with a trace of the whole batch
        if guard.data:
            continue
        found = number_at(guard.expr, interpreter.values, samples)
        unclear = found is None and isinstance(number_kind(guard.expr, interpreter.values), UnknownNumber)
        if unclear or (found is not None and found != guard.expected):
            return f"a branch depends on the number of samples ({guard.line})"
    return ""


def result_of(meta: TensorMeta) -> ResultMeta:
    """Return shape and type of a value, with the symbolic number of samples."""
    shape, batch = list(meta.shape), meta.batch_dim
    if batch is not None:
        shape[batch] = meta.batch_factor * SAMPLES
    seen: Any = "odd" if meta.batch_factor == 0 else batch
    return ResultMeta(tuple(shape), getattr(torch, meta.dtype), meta.requires_grad, seen)


def statement_of(graph: Graph, node: Node, memo: dict[Any, Any]) -> AnalysisStep:
    """Return a node as an analysis step."""
    results = [(Ref(node.id, source, path), result_of(meta)) for (source, path), meta in node.outputs.items()]
    where = f"{node.name} ({node.line})" if node.line else node.name
    if node.is_source:
        (meta,) = node.outputs.values()
        is_input = node.kind == "input" and meta.batch_dim is not None
        kind: Kind = Shard(meta.batch_dim or 0, meta.batch_factor) if is_input else Replicate()
        return AnalysisStep(
            node.id, node.kind, None, results, SAMPLES, True, where, known=True, flaggable=False, run=lambda *_: kind
        )
    forms = (node.args, node.kwargs)
    alone = len(results) == 1 and results[0][0].path == () and results[0][0].source == "ret"
    pure = node.kind == "op" and not node.mutates
    made = AnalysisStep(
        node.id, short_name(node.target), forms, results, SAMPLES, True, where, pure, random=node.random
    )
    made.flaggable, made.writes, made.role = alone and not node.mutates, tuple(node.mutates), node.role
    made.returns_several = node.kind == "call" and not node.mutates and node.out_spec.startswith(("tuple(", "list("))
    made.late = tuple(index for index in node.after if graph.nodes[index].mutates)
    if node.kind == "op" and not results and node.mutates:  # `x[i] = y`: x itself is the result
        ref = node.mutates[0]
        made.results, made.flaggable = [(ref, result_of(graph.meta(ref)))], False
    elif node.kind == "module" or _can_be_opened(node):
        from gemini.batch_analysis.leaf_modules import analyze_leaf

        made.name = node.cls or "module"
        opened = _analyze_stateful_leaf if node.changes else analyze_leaf
        made.run = lambda interpreter, statement: opened(graph, node, interpreter, statement, memo)
    elif node.kind == "function":
        from gemini.batch_analysis.autograd_functions import analyze_autograd_function

        made.run = lambda interpreter, statement: analyze_autograd_function(node, interpreter, statement)
    elif node.kind != "op":
        made.run = lambda interpreter, statement: _analyze_opaque_node(node, interpreter, statement)
    if any(key.source != "ret" for key, _ in made.results):
        made.run = lambda interpreter, statement: _analyze_opaque_node(node, interpreter, statement)
    return made


def _analyze_stateful_leaf(
    graph: Graph, node: Node, interpreter: KindInterpreter, statement: AnalysisStep, memo: dict[Any, Any]
) -> Any:
    """Analyse a leaf that changes state in every run; nothing may be split if that fails."""
    from gemini.batch_analysis.leaf_modules import analyze_leaf

    try:
        return analyze_leaf(graph, node, interpreter, statement, memo)
    except (AnalysisRefused, InheritedRefusal) as refused:
        interpreter.block(statement, f"{statement.where}: it changes state in every run; {refused}")
        raise


def _can_be_opened(node: Node) -> bool:
    """Return whether a block was requested, not caused by Python that could not be traced."""
    chosen = node.reason in ("checkpointed", "asked for") or node.reason.startswith(("depth ", BRANCHES_ON_RESULTS))
    return node.kind == "block" and chosen and node.target != ""


def _analyze_opaque_node(node: Node, interpreter: KindInterpreter, statement: AnalysisStep) -> Kind | list[Kind]:
    """Return the kind of an opaque Python node: replicated if it is a function of replicated values without effects."""
    given = [leaf for leaf in leaves(interpreter.arguments(statement)) if isinstance(leaf, TensorValue)]
    block = f"a basic block: its Python is not traced ({node.reason})"
    if node.kind == "module":  # it could be traced but for its side effects
        block = "it stores tensors in attributes or arguments"
    what = "an opaque Python function" if node.kind == "call" else block
    if node.kind not in MODULES and given and all(value.is_constant for value in given) and not node.random:
        return Replicate()
    if node.kind == "call" and not any(isinstance(value.kind, Opaque) for value in given):
        from gemini.batch_analysis.autograd_functions import analyze_scripted_function

        found = analyze_scripted_function(node, interpreter)
        if found is not None:
            return found
    opaque = next((value.kind for value in given if isinstance(value.kind, Opaque)), None)
    raise AnalysisRefused(what) if opaque is None else InheritedRefusal(opaque.reason)  # the first obstacle is reported
