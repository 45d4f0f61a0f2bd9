"""Tapes: gradients of `tf.GradientTape` by the twin.

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:          operations that the tape records
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, vs)      while tracing: the gradients of the twin, inside the function
        optimizer.apply_gradients(zip(gradients, vs))

A twin differentiates the graph, a tape what it has recorded. Where these differ, as a part of the loss was computed
outside the tape, or where there is no twin, the gradients are the tape's. Outside of functions a training step has no
graph and so no twin: that is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault
from gemini.tensorflow.function_twin import split_function
from gemini.tensorflow.servers import servers_for
from gemini.tensorflow.twin_report import TwinReport

_LOCAL = "/job:localhost/replica:0/task:0"
_original: dict[str, Any] = {}
_own = threading.local()


def patch_tapes(config: GeminiConfig, record: Callable[[TwinReport], None]) -> None:
    """Let the tapes of this process return the gradients of twins; `record` takes their reports."""
    from tensorflow.python.eager.backprop import GradientTape

    _original.update({name: getattr(GradientTape, name) for name in ("gradient", "_push_tape", "_pop_tape")})

    def push(tape: Any) -> None:
        _original["_push_tape"](tape)
        _note(tape, starts=True)

    def pop(tape: Any) -> None:
        _note(tape, starts=False)
        _original["_pop_tape"](tape)

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = _original["gradient"](tape, target, sources, *args, **kwargs)
        if args or kwargs or getattr(_own, "active", False) or not _is_training_step(target, sources):
            return recorded
        return _of_twin(tape, target, sources, recorded, config, record)

    GradientTape.gradient, GradientTape._push_tape, GradientTape._pop_tape = gradient, push, pop


def restore_tapes() -> None:
    """Undo `patch_tapes`."""
    if _original:
        from tensorflow.python.eager.backprop import GradientTape

        for name, function in _original.items():
            setattr(GradientTape, name, function)
        _original.clear()


@contextmanager
def own_gradients() -> Iterator[None]:
    """Let tapes return their own gradients."""
    _own.active = True
    try:
        yield
    finally:
        _own.active = False


def _note(tape: Any, starts: bool) -> None:
    """Note where in the graph a tape starts or stops to record."""
    import tensorflow as tf

    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    spans = tape.__dict__.setdefault("_gemini_spans", [])
    if starts:
        spans.append([graph, len(graph.get_operations()), None])
    elif spans:
        spans[-1][2] = len(graph.get_operations())


def _of_twin(  # noqa: PLR0917
    tape: Any, target: Any, sources: Any, recorded: Any, config: GeminiConfig, record: Callable[[TwinReport], None]
) -> Any:
    import tensorflow as tf

    if tf.executing_eagerly():
        _refuse(config)
        return recorded
    targets = tf.nest.flatten(target)
    variables = [_variable(one) for one in tf.nest.flatten(sources)]
    reason = _obstacle(tape, targets, variables, config)
    if reason:
        record(TwinReport(str(targets[0].name), targets[0].graph.name, reason=reason))
        return recorded
    loss = target
    if len(targets) > 1 or loss.shape.ndims != 0:  # a tape differentiates the sum
        loss = tf.add_n([tf.reduce_sum(one) for one in targets])
    gradients, report = split_function(loss, variables, tf.nest.flatten(recorded), config)
    if not report.runs_twin or loss.graph.outer_graph.building_function:  # a function in a function has no first run
        record(report)
    return tf.nest.pack_sequence_as(sources, gradients)


def _is_training_step(target: Any, sources: Any) -> bool:
    """Return whether a call asks for the gradients of losses with respect to trainable variables."""
    import tensorflow as tf

    targets, wanted = tf.nest.flatten(target), tf.nest.flatten(sources)
    are_losses = all(isinstance(one, tf.Tensor) and one.dtype.is_floating for one in targets)
    return bool(targets and wanted and are_losses and all(_variable(one) is not None for one in wanted))


def _variable(source: Any) -> Any:
    """Return the variable of TensorFlow behind a source; None for others."""
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    value = source if isinstance(source, BaseResourceVariable) else getattr(source, "value", None)
    return value if isinstance(value, BaseResourceVariable) and value.trainable else None


def _refuse(config: GeminiConfig) -> None:
    """Raise for a training step without a graph, where the configuration asks for one in parallel."""
    if config.mode is Mode.AUTO:
        return
    fault = Fault(
        f"a training step runs eagerly, which mode {config.mode.value} cannot split: a tape outside tf.function",
        "put @tf.function on the function with the tape, or run the script with python",
    )
    raise ConfigError([fault], "tf.GradientTape")


def _obstacle(tape: Any, targets: Sequence[Any], variables: Sequence[Any], config: GeminiConfig) -> str:
    """Return why the gradients of a function being traced must be the tape's; empty if they need not."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    if tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return "a strategy of tf.distribute trains it"
    if control_flow_util.GraphOrParentsInXlaContext(targets[0].graph):
        return "the function is compiled by XLA as a whole; write jit_compile=False"
    present = {one.name.replace(_LOCAL, "") for one in tf.config.list_logical_devices()}
    if any(str(device).replace(_LOCAL, "") not in present for device in servers_for(config).devices):
        return "TensorFlow had run operations before the servers could join; start the script with gemini_python"
    outside = _outside(tape, targets, variables)
    return f"{outside} was computed outside the tape" if outside else ""


def _outside(tape: Any, targets: Sequence[Any], variables: Sequence[Any]) -> str:
    """Return the name of an operation between the variables and the losses that the tape has not recorded."""
    graph = targets[0].graph
    operations = graph.get_operations()
    spans = [(start, end) for where, start, end in tape.__dict__.get("_gemini_spans", []) if where is graph]
    recorded = {
        operation for start, end in spans for operation in operations[start : len(operations) if end is None else end]
    }
    handles = {id(graph.capture(one.handle)) for one in variables}
    depends: set[Any] = set()
    for operation in operations:  # in the order they were made: inputs come first
        if any(id(each) in handles or each.op in depends for each in operation.inputs):
            depends.add(operation)
    pending, seen = [one.op for one in targets], set()
    while pending:
        operation = pending.pop()
        if operation in seen or operation not in depends:
            continue
        seen.add(operation)
        if operation not in recorded:
            return str(operation.name)
        pending += [each.op for each in operation.inputs]
    return ""
