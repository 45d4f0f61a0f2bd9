"""Function comparison: the twins of a traced function against its untouched graph, in front of its first run.

Losses and gradients of both are computed from the arguments of that run by a function of their own, which updates
nothing: what the step runs by order alone, as the seeds of dropout, is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import GraphError
from gemini.tensorflow.first_step import compare_values
from gemini.tensorflow.forward_facts import inner_types, is_stateful_type
from gemini.tensorflow.gradient_notes import GradientNote
from gemini.tensorflow.rules.registry import GUARDS, RANDOM, SOURCES, STATEFUL
from gemini.tensorflow.twin_report import Comparison, TwinReport

_STEPS = "_gemini_steps"
_RESOURCE = 20  # DT_RESOURCE


class StepDiffersError(GraphError):
    """The first step of a twin differs from the untouched graph: the function is to be traced without twins."""


@dataclass(frozen=True)
class FunctionStep:
    """A step whose twin is in the graph of a function: what it differentiates, the twin's tensors, and its report."""

    note: GradientNote
    pairs: dict[str, str]  # tensor of the script → tensor of the twin
    report: TwinReport


def add_step(graph: Any, step: FunctionStep) -> None:
    """Compare a step when the function of its graph first runs."""
    setattr(graph, _STEPS, (*getattr(graph, _STEPS, ()), step))


def check_steps(graph: Any, inputs: Sequence[Any], config: GeminiConfig, record: Callable[[TwinReport], None]) -> None:
    """Compare the steps of a function that is about to run; raises StepDiffersError where the twin is not equal."""
    import tensorflow as tf

    steps: tuple[FunctionStep, ...] = getattr(graph, _STEPS, ())
    if not steps or not tf.executing_eagerly():
        return
    delattr(graph, _STEPS)
    for step in steps:
        comparison = _compare(graph, inputs, step)
        fault = comparison.fault if comparison is not None else ""
        report = replace(step.report, comparison=comparison, reason=fault)
        if fault and config.strict:
            raise GraphError(f"{report.line}\n    → strict=False runs it on one device")
        record(report)
        if fault:
            raise StepDiffersError(f"{report.line}\n    → call the function itself, not its concrete function")


def _compare(graph: Any, inputs: Sequence[Any], step: FunctionStep) -> Comparison | None:
    """Return how the twin compares; None where the step takes its batch from an iterator, which it would consume."""
    import tensorflow as tf

    names = list(dict.fromkeys([*step.pairs, *step.pairs.values()]))
    definition = tf.compat.v1.graph_util.extract_sub_graph(
        graph.as_graph_def(), [name.partition(":")[0] for name in names]
    )
    if any(node.op in SOURCES for node in definition.node):
        return None
    used = {name for node in definition.node for name in node.input}
    given = {one.op.name: value for one, value in zip(graph.inputs, inputs, strict=True) if one.op.name in used}

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def compute(*values: Any) -> Any:
        mapped = {f"{name}:0": value for name, value in zip(given, values, strict=True)}
        return tf.graph_util.import_graph_def(definition, mapped, names, name="")

    kept = _read_written(definition, given)
    found = dict(zip(names, compute(*given.values()), strict=True))
    for handle, value in kept:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    values = {name: (found[name].numpy(), found[other].numpy()) for name, other in step.pairs.items()}
    return compare_values((step.note,), values)


def _read_written(definition: Any, given: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the variables that ops may write, with their values."""
    import tensorflow as tf

    functions = {one.signature.name: one for one in definition.library.function}
    harmless = STATEFUL | RANDOM | GUARDS
    writers = [
        node for node in definition.node
        if any(is_stateful_type(kind) and kind not in harmless for kind in (node.op, *inner_types(node, functions)))
    ]  # fmt: skip
    written = {name for node in writers for name in node.input if name in given}
    kept = []
    for handle in (given[name] for name in sorted(written)):
        data = getattr(handle, "_handle_data", None)
        if handle.dtype.as_datatype_enum == _RESOURCE and data is not None and data.shape_and_type:
            kept.append((handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=data.shape_and_type[0].dtype)))
    return kept
