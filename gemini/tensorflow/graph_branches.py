"""Graph branches: conditionals of the forward part as ops of the mirror; a twin divides the branch that is taken.

    script's graph               mirror                                       twin, as the predicate is fed as true
    y = If(p, x, then, else)     x ─→ Switch(p) ─→ then/… ─┐                  x ─→ then/… ─→ y
                                            └────→ else/… ─┴─→ Merge ─→ y

The mirror computes what the conditional does, and an op that draws random numbers is one op for twins and mirror. A
twin knows the branch where the predicate follows from what the step is fed (`training`), and from constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gemini.tensorflow.forward_facts import VARIANT, inner_types
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.rules.registry import RANDOM, STATEFUL

CONDITIONALS = ("If", "StatelessIf")
_SIDES = {"else": 0, "then": 1}
_MARK = "/branch_"


@dataclass(frozen=True)
class StandIn:
    """An op of the twin's facts that the script's graph does not have."""

    name: str
    type: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    node_def: Any
    op_def: Any
    control_inputs: tuple[Any, ...] = ()


def branch_owner(name: str) -> str:
    """Return the name of the conditional that an op is in; that of the op where it is in none."""
    return name.partition(_MARK)[0]


def is_branched(node: Any, functions: Mapping[str, Any]) -> bool:
    """Whether a node is a conditional without effects and with results."""
    if node.op not in CONDITIONALS or not node.attr["Tout"].list.type:
        return False
    return {*inner_types(node, functions)} <= RANDOM | STATEFUL


def write_branches(writer: NodeWriter, node: Any, functions: Mapping[str, Any], device: str) -> None:
    """Write a conditional as switches, both branches and merges; an op of its name has the results."""
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

    predicate, *data = [name for name in node.input if not name.startswith("^")]
    controls = [name for name in node.input if name.startswith("^")]
    start = f"{node.name}{_MARK}"
    boolean, types = 10, [*node.attr["Tin"].list.type]  # DT_BOOL
    if node.attr["Tcond"].type != boolean:
        predicate = writer.add("ToBool", f"{start}predicate", [predicate], device, T_type=node.attr["Tcond"].type)
    writer.add("Switch", f"{start}pivot", [predicate, predicate, *controls], device, T_type=boolean)
    for at, (name, kind) in enumerate(zip(data, types, strict=True)):
        writer.add("Switch", f"{start}switch_{at}", [name, predicate, *controls], device, T_type=kind)
    results: dict[str, list[str]] = {}
    for side, port in _SIDES.items():
        prefix, function = f"{start}{side}/", functions[node.attr[f"{side}_branch"].func.name]
        writer.add("Identity", f"{prefix}pivot", [f"{start}pivot:{port}"], device, T_type=boolean)
        body, flat_names = function_def_to_graph_def(function)
        arguments = {one.name: at for at, one in enumerate(function.signature.input_arg)}
        for inner in body.node:
            if inner.name in arguments:
                at = arguments[inner.name]
                writer.add("Identity", prefix + inner.name, [f"{start}switch_{at}:{port}"], device, T_type=types[at])
                continue
            given = [_inside(name, prefix) for name in inner.input]
            has_data = any(not name.startswith("^") for name in given)
            writer.copy(inner, prefix + inner.name, given if has_data else [*given, f"^{prefix}pivot"], device)
        results[side] = [prefix + flat_names[function.ret[one.name]] for one in function.signature.output_arg]
    merged = []
    for at, (kind, *parts) in enumerate(
        zip(node.attr["Tout"].list.type, results["else"], results["then"], strict=True)
    ):
        merged.append(writer.add("Merge", f"{start}merge_{at}", parts, device, T_type=kind, N=2))
    writer.add("IdentityN", node.name, merged, device, T_types=[*node.attr["Tout"].list.type])


def _inside(name: str, prefix: str) -> str:
    return f"^{prefix}{name[1:]}" if name.startswith("^") else prefix + name


def take_branches(ops: Iterable[Any], taken: Mapping[str, bool], graph: Any) -> list[Any]:
    """Return forward ops with the branch that is taken in the place of conditionals, by name of their predicates."""
    result: list[Any] = []
    for op in ops:
        side = taken.get(op.inputs[0].name) if op.type in CONDITIONALS else None
        mirrored = graph.get_operation_by_name(op.name)
        if side is None or mirrored.type != "IdentityN":
            result.append(op)
            continue
        prefix = f"{op.name}{_MARK}{'then' if side else 'else'}/"
        read = [merge.op.inputs[int(side)] for merge in mirrored.inputs]
        is_list = [one.dtype.as_datatype_enum == VARIANT for one in op.outputs]
        count = is_list.index(True) if True in is_list else len(is_list)  # then follow values for the backward part
        switches = {f"{op.name}{_MARK}switch_{at}": tensor for at, tensor in enumerate(op.inputs[1:])}
        for inner in _reach([one.op for one in read[:count]], prefix):
            source = switches.get(inner.inputs[0].op.name) if inner.type == "Identity" else None
            result.append(inner if source is None else _stand_in(inner, "Identity", (source,), tuple(inner.outputs)))
        result.append(_stand_in(op, "IdentityN", tuple(read[:count]), tuple(op.outputs[:count])))
    return result


def _reach(ops: list[Any], prefix: str) -> list[Any]:
    """Return the ops of a branch that results need, inputs first."""
    order: dict[Any, None] = {}
    stack = [(op, False) for op in ops]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            order[op] = None
        elif op not in order and op.name.startswith(prefix):
            stack += [(op, True), *((tensor.op, False) for tensor in op.inputs)]
    return list(order)


def _stand_in(op: Any, kind: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> StandIn:
    import tensorflow.compat.v1 as tf
    from tensorflow.python.framework import op_def_registry

    node = tf.NodeDef(name=op.name, op=kind, input=[one.name for one in inputs])
    types = [one.dtype.as_datatype_enum for one in outputs]
    if kind == "IdentityN":
        node.attr["T"].list.type.extend(types)
    else:
        node.attr["T"].type = types[0]
    return StandIn(op.name, kind, inputs, outputs, node, op_def_registry.get(kind))
