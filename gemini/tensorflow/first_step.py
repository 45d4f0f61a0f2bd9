"""First step: the losses and gradients of a twin against those of the untouched graph, on one batch.

Both run in one call, without an update, and read the same random numbers; these become feeds of the step itself, so
that the generators are where one device would have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from gemini.tensorflow.forward_facts import inner_types
from gemini.tensorflow.gradient_notes import GradientNote, components
from gemini.tensorflow.split_plan import SplitRefused
from gemini.tensorflow.twin_graph import TwinGraph
from gemini.tensorflow.twin_report import Comparison

_TINY = 1e-30
_WRITERS = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")


class Runner(Protocol):
    """Runs tensors of the mirror by name."""

    def run_names(self, names: list[str], ops: Sequence[str], fed: Mapping[str, Any]) -> list[Any]:
        """Return their values."""
        ...


def compare_steps(
    runner: Runner, twin: TwinGraph, fed: Mapping[str, Any], taken: Sequence[str] = ()
) -> tuple[dict[str, Any], Comparison]:
    """Return the values that the step itself is to use, and the comparison.

    These are the random numbers that were drawn, and the tensors `taken`: what the step would draw again to make them.
    """
    notes = twin.notes
    tensors = [tensor for note in notes for tensor in (*note.losses, *note.tensors)]
    old = [tensor.name for tensor in tensors]
    new, _ = twin.resolve(tensors, [])
    random = [*twin.pieces.random, *taken]
    names = list(dict.fromkeys([*old, *new, *random]))
    with _keep_variables(runner, twin.graph, names, fed) as has_updates:
        if has_updates and taken:
            raise SplitRefused("variables are updated in front of the gradients of a loop that draws random numbers")
        found = dict(zip(names, runner.run_names(names, (), fed), strict=True))
    pairs = {name: (found[name], found[other]) for name, other in zip(old, new, strict=True)}
    return {name: found[name] for name in random}, compare_values(notes, pairs)


def compare_values(notes: tuple[GradientNote, ...], pairs: Mapping[str, tuple[Any, Any]]) -> Comparison:
    """Return the comparison of the losses and gradients of notes, by the names of their tensors."""
    losses = [loss.name for note in notes for loss in note.losses]
    one, other = (float(np.sum([np.sum(pairs[name][at], dtype=float) for name in losses])) for at in (0, 1))
    return Comparison(one, other, *_gradient_error(notes, pairs))


@contextmanager
def _keep_variables(runner: Runner, graph: Any, names: Sequence[str], fed: Mapping[str, Any]) -> Iterator[bool]:
    """Restore the variables that tensors update by order alone, as averages of a batch norm in front of gradients."""
    import tensorflow.compat.v1 as tf
    from tensorflow.python.ops import gen_resource_variable_ops as variables

    tensors = [graph.get_tensor_by_name(name) for name in names]
    reached = reach_ops([tensor.op for tensor in tensors if tensor.name not in fed], fed)
    functions = {one.signature.name: one for one in graph.as_graph_def().library.function}
    writers = [
        op for op in reached
        if any(kind.startswith(_WRITERS) for kind in (op.type, *inner_types(op.node_def, functions)))
    ]  # fmt: skip
    handles = {tensor.ref(): tensor for op in writers for tensor in op.inputs if tensor.op.type == "VarHandleOp"}
    reads, holders, restores = [], [], []
    with graph.as_default(), tf.name_scope("gemini/first_step/"):
        for handle in handles.values():
            with tf.device(handle.op.device):
                reads.append(variables.read_variable_op(handle, handle.op.get_attr("dtype")))
                holders.append(tf.placeholder(reads[-1].dtype))
                restores.append(variables.assign_variable_op(handle, holders[-1]))
    values = runner.run_names([one.name for one in reads], (), {}) if reads else []
    yield bool(restores)
    if restores:
        kept = {holder.name: value for holder, value in zip(holders, values, strict=True)}
        runner.run_names([], [one.name for one in restores], kept)


def reach_ops(ops: Sequence[Any], fed: Mapping[str, Any]) -> dict[Any, None]:
    """Return all ops that a run executes, in a fixed order."""
    found: dict[Any, None] = {}
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op in found:
            continue
        found[op] = None
        stack += [tensor.op for tensor in op.inputs if tensor.name not in fed]
        stack += op.control_inputs
    return found


def _gradient_error(notes: tuple[GradientNote, ...], pairs: Mapping[str, tuple[Any, Any]]) -> tuple[float, str]:
    """Return the largest error relative to the largest entry of its gradient, and the variable it belongs to.

    A gradient that is zero but for rounding is measured by the largest entry of all.
    """
    dense = {}
    for note in notes:
        for source, gradient in zip(note.sources, note.gradients, strict=True):
            if gradient is not None:
                parts = [pairs[tensor.name] for tensor in components(gradient)]
                dense[source.op.name] = tuple(_dense([part[at] for part in parts]) for at in (0, 1))
    largest = max((float(np.max(np.abs(one), initial=0.0)) for one, _ in dense.values()), default=0.0)
    worst, name = 0.0, ""
    for variable, (one, other) in dense.items():
        if one.shape != other.shape:
            return float("inf"), variable
        scale = max(float(np.max(np.abs(one), initial=0.0)), 1e-2 * largest, _TINY)
        error = float(np.max(np.abs(one - other), initial=0.0)) / scale
        if not error <= worst:
            worst, name = error, variable
    return worst, name


def _dense(parts: list[Any]) -> Any:
    """Return a gradient as one array; rows are added up by index."""
    if len(parts) == 1:
        return np.asarray(parts[0], dtype=np.float64)
    rows, indices = np.asarray(parts[0], dtype=np.float64), np.asarray(parts[1])
    unique, places = np.unique(indices, return_inverse=True)
    total = np.zeros((len(unique), *rows.shape[1:]))
    np.add.at(total, places.reshape(-1), rows)
    return total
