"""Forward facts: the ops from the sources of a step to its losses, with shapes and values for one batch shape.

The shapes of a step are known when its feeds are. The forward part is imported into a graph of its own in which every
source has its shape; TensorFlow infers all others. Values that depend on shapes and constants alone (axes, sizes,
offsets) are computed there once, so that the rules of ops see numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemini.tensorflow.loop_shapes import const_node, refine_loops
from gemini.tensorflow.piece_layouts import Shape
from gemini.tensorflow.split_way import ForwardOp

_MOST = 1 << 22  # entries of a value that is computed in advance
VARIANT = 21  # DT_VARIANT
_HANDLES = (20, VARIANT)  # DT_RESOURCE
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_UNFOLDED = ("Const", "ReadVariableOp", "VarHandleOp", "Placeholder")


@dataclass(frozen=True)
class ForwardFacts:
    """The ops in an order that respects their inputs, and what is known of their tensors."""

    ops: tuple[ForwardOp, ...]
    shape_of: dict[str, Shape | None]
    type_of: dict[str, int]  # the number of a DType
    value_of: dict[str, Any]
    tainted: frozenset[str]  # tensors that depend on a source
    trained: frozenset[str]  # tensors that depend on a variable
    node_of: dict[str, Any]  # the definitions of the ops

    def __iter__(self) -> Iterator[ForwardOp]:
        return iter(self.ops)


def forward_ops(tensors: Iterable[Any], sources: Mapping[str, Any]) -> list[Any] | None:
    """Return the ops that compute tensors from sources, inputs first; None where they form a loop."""
    order: list[Any] = []
    state: dict[Any, bool] = {}  # False: entered, True: listed
    stack = [(tensor.op, False) for tensor in tensors if tensor.name not in sources]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            if not state[op]:
                state[op] = True
                order.append(op)
            continue
        if op in state:
            continue
        state[op] = False
        stack.append((op, True))
        for tensor in op.inputs:
            if tensor.name in sources:
                continue
            before = state.get(tensor.op)
            if before is None:
                stack.append((tensor.op, False))
    places = {op: at for at, op in enumerate(order)}
    for op in order:
        if any(tensor.name not in sources and places[tensor.op] > places[op] for tensor in op.inputs):
            return None
    return order


def read_facts(ops: list[Any], sources: Mapping[str, Shape], library: Any) -> ForwardFacts:
    """Return the facts of forward ops whose sources have these shapes."""
    import tensorflow.compat.v1 as tf

    nodes = [op.node_def for op in ops]
    functions = {one.signature.name: one for one in library.function} if library is not None else {}
    scratch = _import_with_shapes(tf, ops, nodes, sources, library)
    if loops := [node for node in nodes if "body" in node.attr and node.attr["body"].func.name in functions]:
        refined = refine_loops(scratch, nodes, loops, functions)
        scratch = _import_with_shapes(tf, ops, refined, sources, library)
    shape_of: dict[str, Shape | None] = {}
    type_of: dict[str, int] = {}
    for at, (name, shape) in enumerate(sources.items()):
        shape_of[name] = shape
        type_of[name] = int(scratch.get_operation_by_name(f"gemini_source_{at}").outputs[0].dtype.as_datatype_enum)
    for op in ops:
        for tensor in scratch.get_operation_by_name(op.name).outputs:
            known = tensor.shape.is_fully_defined()
            shape_of[tensor.name] = tuple(tensor.shape.as_list()) if known else None
            type_of[tensor.name] = int(tensor.dtype.as_datatype_enum)
    value_of = _fold(tf, ops, nodes, shape_of, library)
    tainted, trained = _dependents(ops, sources)
    listed = tuple(
        _fact(op, node, shape_of, value_of, inner_types(node, functions)) for op, node in zip(ops, nodes, strict=True)
    )
    node_of = {node.name: node for node in nodes}
    return ForwardFacts(listed, shape_of, type_of, value_of, frozenset(tainted), frozenset(trained), node_of)


def _import_with_shapes(tf: Any, ops: list[Any], nodes: list[Any], sources: Mapping[str, Shape], library: Any) -> Any:
    """Return a graph of the nodes, in which every source has its shape."""
    mapped = {}
    by_name = {tensor.name: tensor for op in ops for tensor in op.inputs if tensor.name in sources}
    with tf.Graph().as_default() as scratch:
        for at, (name, shape) in enumerate(sources.items()):
            dtype = by_name[name].dtype if name in by_name else tf.float32
            mapped[name] = tf.placeholder(dtype, shape, f"gemini_source_{at}")
        part = _graph_def(tf, nodes, library)
        tf.import_graph_def(part, {name: mapped[name] for name in mapped if name in by_name}, name="")
    return scratch


def _graph_def(tf: Any, nodes: list[Any], library: Any) -> Any:
    """Return a graph of copies of the nodes, without devices, colocation and inputs for order alone."""
    part = tf.GraphDef()
    part.versions.CopyFrom(tf.get_default_graph().as_graph_def().versions)
    if library is not None:
        part.library.CopyFrom(library)
    for node in nodes:
        copy = part.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        copy.attr.pop("_class", None)
        data = [name for name in node.input if not name.startswith("^")]
        del copy.input[:]
        copy.input.extend(data)
    return part


def _fold(
    tf: Any, ops: list[Any], nodes: list[Any], shape_of: Mapping[str, Shape | None], library: Any
) -> dict[str, Any]:
    """Return the values of tensors that depend on shapes and constants alone."""
    from tensorflow.python.framework.tensor_util import MakeNdarray

    values: dict[str, Any] = {}
    folded: set[str] = set()
    steps = []
    for op, node in zip(ops, nodes, strict=True):
        if op.type == "Const":
            values[op.outputs[0].name] = MakeNdarray(node.attr["value"].tensor)
            folded.add(op.name)
            steps.append(node)
        elif op.type in _SHAPES and all(shape_of.get(tensor.name) is not None for tensor in op.inputs):
            kind = op.outputs[0].dtype.as_numpy_dtype
            for tensor, result in zip(op.inputs, op.outputs, strict=True):
                shape = shape_of[tensor.name] or ()
                found = {"Size": int(np.prod(shape)), "Rank": len(shape)}.get(op.type, shape)
                values[result.name] = np.array(found, dtype=kind)
            if len(op.outputs) == 1:
                folded.add(op.name)
                steps.append(const_node(op.name, values[op.outputs[0].name]))
        elif _is_foldable(op, node, shape_of) and op.inputs and all(tensor.op.name in folded for tensor in op.inputs):
            folded.add(op.name)
            steps.append(node)
    wanted = [tensor.name for op in ops if op.name in folded for tensor in op.outputs if tensor.name not in values]
    if wanted:
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(_graph_def(tf, steps, library), name="")
            settings = tf.ConfigProto(device_count={"CPU": 1}, use_per_session_threads=False)
            session = tf.Session(graph=graph, config=settings)
            with session:
                values.update(zip(wanted, session.run(wanted), strict=True))
    return values


def _is_foldable(op: Any, node: Any, shape_of: Mapping[str, Shape | None]) -> bool:
    if op.type in _UNFOLDED or op.op_def.is_stateful or op.type.startswith("Random"):
        return False
    if any(value.HasField("func") for value in node.attr.values()):
        return False
    if any(tensor.dtype.as_datatype_enum in _HANDLES for tensor in op.outputs):
        return False
    shapes = [shape_of.get(tensor.name) for tensor in op.outputs]
    return all(shape is not None and np.prod(shape, dtype=float) <= _MOST for shape in shapes)


def _dependents(ops: list[Any], sources: Mapping[str, Shape]) -> tuple[set[str], set[str]]:
    """Return the tensors that depend on a source, and those that depend on a variable."""
    tainted, trained = set(sources), set()
    for op in ops:
        names = [tensor.name for tensor in op.outputs]
        before = [tensor.name for tensor in op.inputs]
        if any(name in tainted for name in before):
            tainted.update(names)
        if op.type == "VarHandleOp" or any(name in trained for name in before):
            trained.update(names)
    return tainted, trained


def inner_types(node: Any, functions: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types of the stateful ops in the functions that a node calls."""
    found: set[str] = set()
    seen: set[str] = set()
    stack = [node]
    while stack:
        attributes = stack.pop().attr.values()
        called = {one.name for value in attributes for one in (value.func, *value.list.func) if one.name} - seen
        seen |= called
        for inner in (inner for name in called & functions.keys() for inner in functions[name].node_def):
            stack.append(inner)
            if is_stateful_type(inner.op):
                found.add(inner.op)
    return tuple(sorted(found))


def drawing_region(
    ops: Sequence[tuple[str, Iterable[str]]], random: set[str], makers: Mapping[str, str], variants: set[str]
) -> set[str]:
    """Return ops whose functions draw random numbers, with what unpacks their lists, and all that these depend on.

    Only the op that one device would run draws its numbers: copies of it would begin their own. `ops` are names and
    inputs, inputs first; `variants` are tensors that hold lists.
    """
    found = set(random)
    for name, inputs in ops:
        if any(one in variants and makers.get(one) in found for one in inputs):
            found.add(name)
    for name, inputs in reversed(ops):
        if name in found:
            found.update(makers[one] for one in inputs if one in makers)
    return found


def is_stateful_type(kind: str) -> bool:
    """Whether ops of a type are no functions of their inputs, by TensorFlow's definition."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(kind)
    return definition is not None and bool(definition.is_stateful)


def _fact(
    op: Any, node: Any, shape_of: Mapping[str, Shape | None], value_of: Mapping[str, Any], inner: tuple[str, ...]
) -> ForwardOp:
    inputs = tuple(tensor.name for tensor in op.inputs)
    outputs = tuple(tensor.name for tensor in op.outputs)
    return ForwardOp(
        op.name, op.type, inputs, outputs,
        tuple(shape_of.get(name) for name in inputs), tuple(shape_of.get(name) for name in outputs),
        tuple(value_of.get(name) for name in inputs), node.attr,
        tuple(control.name for control in op.control_inputs), bool(op.op_def.is_stateful), inner,
    )  # fmt: skip
