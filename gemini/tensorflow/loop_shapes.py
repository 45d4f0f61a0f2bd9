"""Loop shapes: what a loop returns, where TensorFlow knows less than the body of the loop.

A loop variable keeps the shape that it starts with if the body returns that shape. A list of results, as of a recurrent
network, has the length that it was reserved with, and entries of the shape that the body writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def refine_loops(graph: Any, nodes: Sequence[Any], loops: Sequence[Any], functions: Mapping[str, Any]) -> list[Any]:
    """Return the nodes with the shapes of loops in a graph whose sources have theirs."""
    import tensorflow.compat.v1 as tf
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

    entries: dict[str, Any] = {}
    changed: dict[str, list[Any]] = {}
    for node in loops:
        inputs = graph.get_operation_by_name(node.name).inputs
        function = _copy(functions[node.attr["body"].func.name])
        function.arg_attr.clear()  # shapes for any batch
        with graph.as_default():
            body = function_def_to_graph(function, input_shapes=[one.shape for one in inputs])
        copy = _copy(node)
        del copy.attr["output_shapes"].list.shape[:]
        for at, (given, result) in enumerate(zip(inputs, body.outputs, strict=True)):
            is_same = given.shape.is_fully_defined() and given.shape.as_list() == result.shape.as_list()
            known = given.shape if is_same else tf.TensorShape(None)
            copy.attr["output_shapes"].list.shape.add().CopyFrom(known.as_proto())
            writer, maker = _skip_identities(result).op, _skip_identities(given).op
            if writer.type == "TensorListSetItem" and maker.type == "TensorListReserve":
                with graph.as_default():  # TensorFlow evaluates shapes, of which the length is one
                    length = tf.fill(tf.reshape(maker.inputs[1], [1]), 0).shape.as_list()[0]
                entries[f"{node.name}:{at}"] = (length, writer.inputs[2].shape)
        changed[node.name] = [copy]
    for node in (node for node in nodes if node.op == "TensorListStack"):
        source = _skip_identities(graph.get_operation_by_name(node.name).inputs[0])
        length, shape = entries.get(source.name, (None, None))
        if shape is not None and shape.is_fully_defined():
            sizes, copy = const_node(f"{node.name}/gemini_shape", np.array(shape.as_list(), np.int32)), _copy(node)
            copy.input[1] = sizes.name
            if length is not None:
                copy.attr["num_elements"].i = length
            changed[node.name] = [sizes, copy]
    return [one for node in nodes for one in changed.get(node.name, [node])]


def _skip_identities(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _copy(node: Any) -> Any:
    made = type(node)()
    made.CopyFrom(node)
    return made


def const_node(name: str, value: Any) -> Any:
    """Return the node of a constant."""
    import tensorflow.compat.v1 as tf

    node = tf.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node
