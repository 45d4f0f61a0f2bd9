"""Rolled graphs: the kinds of values of loops over samples, where the graph of one micro-batch represents several.

A node's *role* is its meaning for the whole batch (proven by `gemini.capture.sample_loops`). A value with one copy per
micro-batch, made of its samples alone, is `PerMicroBatch`. Copies result from unstacking samples, and become samples
again where they are stacked in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.assumptions import SameBranches, SameContents
from gemini.batch_analysis.batch_kinds import Kind, Opaque, PerMicroBatch, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, SampleCount, TensorValue, UnknownNumber, leaves
from gemini.capture.graph_guards import causing_inputs, early_guards
from gemini.ir.pytree import Ref, expr_refs

if TYPE_CHECKING:
    from gemini.batch_analysis.analysis_steps import AnalysisStep
    from gemini.batch_analysis.propagate import KindInterpreter
    from gemini.ir.graph import Graph

_JOINS = ("cat", "stack", "hstack", "vstack", "dstack", "tensor", "as_tensor", "pad_sequence")
_MOST = 1 << 12  # entries of an input that is compared with the capture before every step


def kind_of_role(statement: AnalysisStep, args: Any, kwargs: Any) -> Kind:
    """Return the kind of the results of a node with a role."""
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorValue)]
    opaque = next((value.kind for value in given if isinstance(value.kind, Opaque)), None)
    if opaque is not None:
        raise AnalysisRefused(opaque.reason)
    if statement.random:
        raise AnalysisRefused("random numbers drawn sample by sample")
    if statement.role == "parts":
        return _unstack_kind(args[0], [])
    if statement.role in ("take", "put"):
        rest = [leaf for leaf in leaves((args[1:], kwargs)) if isinstance(leaf, TensorValue)]
        found = _unstack_kind(args[0], rest)
        return args[0].kind if statement.role == "put" else found
    if any(isinstance(leaf, (SampleCount, UnknownNumber)) for leaf in leaves((args, kwargs))):
        raise AnalysisRefused("a loop over samples uses their number")
    _check_own_values(given)
    return _stack_kind(statement) if statement.role == "join" else PerMicroBatch()


def _unstack_kind(whole: Any, rest: Iterable[TensorValue]) -> Kind:
    if not isinstance(whole, TensorValue) or not isinstance(whole.kind, Shard) or whole.kind.outer != 1:
        raise AnalysisRefused("a loop over anything but samples in order")
    _check_own_values(rest)
    return PerMicroBatch()


def _check_own_values(values: Iterable[TensorValue]) -> None:
    """Refuse values other than those of the same micro-batch and replicated ones."""
    for value in values:
        if not isinstance(value.kind, (PerMicroBatch, Replicate)):
            raise AnalysisRefused("a loop over samples reads all of them at once")


def _stack_kind(statement: AnalysisStep) -> Kind:
    ((_, result),) = statement.results
    if statement.name not in _JOINS or not isinstance(result.batch, int):
        raise AnalysisRefused(f"{statement.name} of a list with one entry per sample")
    return Shard(result.batch, result.shape[result.batch] // statement.samples)


def refuse_per_micro_batch(args: Any, kwargs: Any) -> None:
    """Refuse per-micro-batch values as arguments of a step without a role."""
    if any(isinstance(leaf, TensorValue) and isinstance(leaf.kind, PerMicroBatch) for leaf in leaves((args, kwargs))):
        raise AnalysisRefused("a single value of a loop over samples")


def settle_branches(interpreter: KindInterpreter, graph: Graph, bound: dict[str, Any] | None) -> str:
    """Add the conditions that branches on contents are those captured; return why that is impossible.

    `settle_guards` handles guards that are not known before a step.
    """
    wanted = set(graph.pins)
    for guard in early_guards(graph).guards:
        refs = list(expr_refs(guard.expr))
        if any(graph.nodes[ref.node].role and not _is_apart(interpreter, ref) for ref in refs):
            causes = causing_inputs(graph.nodes, refs)
            if causes is None:
                return f"a branch depends on the contents of the batch ({guard.line})"
            wanted |= causes
    if early_guards(graph).guards:
        interpreter.conditions["rolled", -1] = [SameBranches()]
    for index in sorted(wanted):
        condition = _add_content_condition(interpreter, graph, index, bound)
        if isinstance(condition, str):
            return condition
        interpreter.conditions["rolled", index] = [condition]
    return ""


def _is_apart(interpreter: KindInterpreter, ref: Ref) -> bool:
    return ref in interpreter.values and isinstance(interpreter.values[ref].kind, PerMicroBatch)


def _add_content_condition(
    interpreter: KindInterpreter, graph: Graph, index: int, bound: dict[str, Any] | None
) -> SameContents | str:
    from gemini.ir.encode import follow

    node, kind = graph.nodes[index], interpreter.values[Ref(index)].kind
    if bound is None or not isinstance(kind, (Shard, Replicate)):
        return f"a branch depends on the contents of the input {node.target}"
    tensor = follow(bound, graph.inputs[index])
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > _MOST:
        return f"a branch depends on the contents of the input {node.target}"
    numbers = tuple(tensor.detach().flatten().tolist())
    return SameContents(Ref(index), kind if isinstance(kind, Shard) else None, numbers, graph.batch_size or 1)
