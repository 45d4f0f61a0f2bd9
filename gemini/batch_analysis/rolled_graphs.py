"""Rolled graphs: what loops over samples make, when a graph of a micro-batch stands for a batch of several.

A node's *role* says what it is for the whole batch (`gemini.capture.sample_loops` has proven that). What has a copy for
every micro-batch, made of its samples alone, is `Apart`: whatever it computes, it does so for one micro-batch. Copies
come out of samples by taking them apart, and become samples again where they are joined in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.assumptions import Recorded, Repeated
from gemini.batch_analysis.batch_kinds import Apart, Kind, Opaque, Replicate, Shard
from gemini.batch_analysis.op_call import Count, Odd, Refused, Value, leaves
from gemini.capture.graph_guards import causing_inputs, early_guards
from gemini.ir.pytree import Ref, expr_refs

if TYPE_CHECKING:
    from gemini.batch_analysis.analysis_steps import Statement
    from gemini.batch_analysis.propagate import Interpreter
    from gemini.ir.graph import Graph

_JOINS = ("cat", "stack", "hstack", "vstack", "dstack", "tensor", "as_tensor", "pad_sequence")
_MOST = 1 << 12  # entries of a micro-batch's input that is compared with the captured one before every step


def kind_of_role(statement: Statement, args: Any, kwargs: Any) -> Kind:
    """The kind of the results of a node with a role."""
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)]
    opaque = next((value.kind for value in given if isinstance(value.kind, Opaque)), None)
    if opaque is not None:
        raise Refused(opaque.reason)
    if statement.random:
        raise Refused("random numbers that are drawn sample by sample")
    if statement.role == "parts":
        return _taken(args[0], [])
    if statement.role in ("take", "put"):
        rest = [leaf for leaf in leaves((args[1:], kwargs)) if isinstance(leaf, Value)]
        found = _taken(args[0], rest)
        return args[0].kind if statement.role == "put" else found
    if any(isinstance(leaf, (Count, Odd)) for leaf in leaves((args, kwargs))):
        raise Refused("a loop over samples uses their number")
    _own(given)
    return _joined(statement) if statement.role == "join" else Apart()


def _taken(whole: Any, rest: Iterable[Value]) -> Kind:
    if not isinstance(whole, Value) or not isinstance(whole.kind, Shard) or whole.kind.outer != 1:
        raise Refused("a loop over something else than samples in order")
    _own(rest)
    return Apart()


def _own(values: Iterable[Value]) -> None:
    """A copy may read what belongs to its micro-batch, and what is the same in all."""
    for value in values:
        if not isinstance(value.kind, (Apart, Replicate)):
            raise Refused("a loop over samples reads all of them at once")


def _joined(statement: Statement) -> Kind:
    ((_, result),) = statement.results
    if statement.name not in _JOINS or not isinstance(result.batch, int):
        raise Refused(f"{statement.name} of a list with an entry for every sample")
    return Shard(result.batch, result.shape[result.batch] // statement.samples)


def refuse_apart(args: Any, kwargs: Any) -> None:
    """What is not proven to be done for every micro-batch alike must not read what each has of its own."""
    if any(isinstance(leaf, Value) and isinstance(leaf.kind, Apart) for leaf in leaves((args, kwargs))):
        raise Refused("one of the values that a loop over samples makes, without the others")


def settle_branches(interpreter: Interpreter, graph: Graph, bound: dict[str, Any] | None) -> str:
    """Have looked before every step that branches on contents go as captured; why that cannot be.

    About guards that are not known before a step, see `settle_guards`.
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
        interpreter.conditions["rolled", -1] = [Repeated()]
    for index in sorted(wanted):
        condition = _recorded(interpreter, graph, index, bound)
        if isinstance(condition, str):
            return condition
        interpreter.conditions["rolled", index] = [condition]
    return ""


def _is_apart(interpreter: Interpreter, ref: Ref) -> bool:
    return ref in interpreter.values and isinstance(interpreter.values[ref].kind, Apart)


def _recorded(interpreter: Interpreter, graph: Graph, index: int, bound: dict[str, Any] | None) -> Recorded | str:
    from gemini.ir.encode import follow

    node, kind = graph.nodes[index], interpreter.values[Ref(index)].kind
    if bound is None or not isinstance(kind, (Shard, Replicate)):
        return f"a branch depends on the contents of the input {node.target}"
    tensor = follow(bound, graph.inputs[index])
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > _MOST:
        return f"a branch depends on the contents of the input {node.target}"
    numbers = tuple(tensor.detach().flatten().tolist())
    return Recorded(Ref(index), kind if isinstance(kind, Shard) else None, numbers, graph.batch_size or 1)
