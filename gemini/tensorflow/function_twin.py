"""Function twin: the twin of a training step inside a function of TensorFlow, while it is traced.

The function's own graph takes the place of the mirror: the forward part is written into it once more, per micro-batch
and stage, and differentiated there. Arguments of the function are the batch, and their shapes must be known; variables
are captured handles. `redirect` lets everything else that reads the forward part (metrics, averages of a batch norm)
read the twin, so that the first forward part has no readers and is dropped by TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import PartitionError
from gemini.tensorflow.function_comparison import FunctionStep, add_step
from gemini.tensorflow.gradient_notes import GradientNote, components
from gemini.tensorflow.rules.registry import RANDOM, SOURCES, STATEFUL
from gemini.tensorflow.servers import servers_for
from gemini.tensorflow.split_plan import BatchSource, SplitRefused
from gemini.tensorflow.twin_builder import TwinBuilder, forward_facts, twins_of
from gemini.tensorflow.twin_report import TwinReport, batch_text

_RESOURCE = 20  # DT_RESOURCE
_READING = RANDOM | STATEFUL


class FunctionGraph:
    """The graph of a function as the mirror of itself; its variables exist already, whole."""

    variables = None

    def __init__(self, graph: Any) -> None:
        self.source = self.graph = graph
        self.node_of = {op.name: op.node_def for op in graph.get_operations()}
        self.library = graph.as_graph_def().library

    def complete(self, ops: list[Any]) -> list[Any]:
        """Return ops in a form that stands alone: captured variables as the ops that make variables."""
        return _with_handles(ops, self.graph)


@dataclass(frozen=True)
class CapturedHandle:
    """A captured variable, in the form of the op that makes one: with its type and shape."""

    name: str
    outputs: tuple[Any, ...]
    node_def: Any
    op_def: Any
    type: str = "VarHandleOp"
    inputs: tuple[Any, ...] = ()
    control_inputs: tuple[Any, ...] = ()


def split_function(
    loss: Any, variables: Sequence[Any], recorded: Sequence[Any], config: GeminiConfig
) -> tuple[list[Any], TwinReport]:
    """Return the gradients of `loss` by a twin in its graph, and a report; the `recorded` ones without a twin.

    The step is compared with these when the function first runs.
    """
    report = TwinReport(str(loss.name), "")
    note = GradientNote((loss,), tuple(loss.graph.capture(one.handle) for one in variables), tuple(recorded), {})
    try:
        shapes = _sources(loss)
        mirror = FunctionGraph(loss.graph)
        facts = forward_facts([loss], shapes, mirror)
        builder = TwinBuilder(config, servers_for(config), mirror)
        builder.cut(facts)
        sources = {name: BatchSource(shape) for name, shape in shapes.items()}
        report = replace(report, batch=batch_text(shapes.values()))
        twin, report = builder.build((note,), facts, sources, shapes, report)
    except (SplitRefused, PartitionError) as refused:
        return list(recorded), replace(report, reason=str(refused).partition("\n")[0])
    tensors = [loss, *note.tensors]
    names = dict(zip([one.name for one in tensors], twin.resolve(tensors, ())[0], strict=True))
    add_step(loss.graph, FunctionStep(note, names, report))
    return [_renamed(one, names) for one in recorded], report


def _renamed(gradient: Any, names: dict[str, str]) -> Any:
    """Return the gradient of the twin, in the form of that of the tape."""
    import tensorflow as tf

    parts = [one.graph.get_tensor_by_name(names[one.name]) for one in components(gradient)]
    if len(parts) == 2:
        return tf.IndexedSlices(*parts, dense_shape=gradient.dense_shape)
    return parts[0] if parts else None


def _sources(loss: Any) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a step takes in, with their shapes: arguments, outer functions' tensors, iterators."""
    import tensorflow as tf

    graph = loss.graph
    constants = {id(inner) for outer, inner in graph.captures if isinstance(outer, tf.__internal__.EagerTensor)}
    found = [one for one in graph.inputs if id(one) not in constants and one.dtype.as_datatype_enum != _RESOURCE]
    found += [
        tensor for op in graph.get_operations() if op.type in SOURCES for tensor in op.outputs
        if tensor.dtype.as_datatype_enum != _RESOURCE
    ]  # fmt: skip
    sources = {}
    for tensor in found:
        if tensor.dtype == tf.variant:
            continue
        if not tensor.shape.is_fully_defined():
            raise SplitRefused(
                f"the function is traced for batches of any size ({tensor.name} has the shape {tensor.shape}); "
                "pass tensors of one size, without input_signature and reduce_retracing"
            )
        sources[tensor.name] = tuple(tensor.shape.as_list())
    return sources


def _with_handles(ops: Sequence[Any], graph: Any) -> list[Any]:
    """Return the ops with those of captured variables in the form that makes a variable."""
    import tensorflow.compat.v1 as tf

    outer = {id(inner): given for given, inner in graph.captures}
    result = []
    for op in ops:
        if op.type != "Placeholder" or op.outputs[0].dtype != tf.resource:
            result.append(op)
            continue
        handle = outer.get(id(op.outputs[0]), op.outputs[0])
        data = getattr(handle, "_handle_data", None) or getattr(op.outputs[0], "_handle_data", None)
        if data is None or not data.shape_and_type:
            raise SplitRefused(f"{op.name} is a resource of unknown shape")
        node = tf.NodeDef(name=op.name, op="VarHandleOp")
        node.attr["dtype"].type = data.shape_and_type[0].dtype
        node.attr["shape"].shape.CopyFrom(data.shape_and_type[0].shape)
        result.append(CapturedHandle(op.name, tuple(op.outputs), node, _handle_definition()))
    return result


def _handle_definition() -> Any:
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get("VarHandleOp")


def redirect(graph: Any, results: Sequence[Any]) -> None:
    """Let what has an effect or leads to the results read the twins of a function, in place of the forward parts."""
    for twin in twins_of(graph):
        forward = {op.name for op in twin.facts}
        changed = twin.facts.tainted & twin.facts.trained
        for op in _live(graph, results, forward, twin.prefix):
            for at, tensor in enumerate(op.inputs):
                if tensor.op.name in forward and tensor.name in changed:
                    op._update_input(at, twin.whole(tensor.name))


def _live(graph: Any, results: Sequence[Any], forward: set[str], prefix: str) -> list[Any]:
    """Return the ops outside of the forward part and its twin that effects and results depend on."""
    stack = [op for op in graph.get_operations() if op.op_def.is_stateful and op.type not in _READING]
    stack += [one.op for one in results if getattr(one, "graph", None) is graph]
    seen = set()
    while stack:
        op = stack.pop()
        if op in seen or op.name in forward or op.name.startswith(prefix):
            continue
        seen.add(op)
        stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return list(seen)
