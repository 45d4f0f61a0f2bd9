"""optimize_loss of tf.contrib.layers, which exports it: gradients, clipping and an optimizer in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemini.tensorflow.compat.lazy_names import tf

_BY_NAME = {
    "Adagrad": "AdagradOptimizer",
    "Adam": "AdamOptimizer",
    "Ftrl": "FtrlOptimizer",
    "RMSProp": "RMSPropOptimizer",
    "SGD": "GradientDescentOptimizer",
}


def optimize_loss(
    loss: Any,
    global_step: Any,
    learning_rate: Any,
    optimizer: Any,
    clip_gradients: Any = None,
    learning_rate_decay_fn: Callable[..., Any] | None = None,
    update_ops: Sequence[Any] | None = None,
    variables: Sequence[Any] | None = None,
    name: str | None = None,
    increment_global_step: bool = True,
) -> Any:
    """Return an operation that makes one step and returns the loss."""
    with tf.variable_scope(name, "OptimizeLoss", [loss, global_step]):
        counter = tf.train.get_or_create_global_step() if global_step is None else global_step
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS) if update_ops is None else update_ops
        with tf.control_dependencies(list(updates)):
            loss = tf.identity(loss)
        rate = learning_rate
        if learning_rate is not None and learning_rate_decay_fn is not None:
            rate = learning_rate_decay_fn(learning_rate, counter)
        chosen = tf.trainable_variables() if variables is None else list(variables)
        made = _optimizer(optimizer, rate)
        pairs = made.compute_gradients(loss, chosen)
        if clip_gradients is not None:
            pairs = _clipped(pairs, clip_gradients)
        step = made.apply_gradients(pairs, global_step=counter if increment_global_step else None, name="train")
        with tf.control_dependencies([step]):
            return tf.identity(loss)


def _optimizer(given: Any, rate: Any) -> Any:
    if isinstance(given, str):
        if given not in _BY_NAME:
            raise ValueError(f"Optimizer name should be one of [{', '.join(_BY_NAME)}], you provided {given}.")
        return getattr(tf.train, _BY_NAME[given])(learning_rate=rate)
    if isinstance(given, type):
        return given(learning_rate=rate)
    if callable(given):
        return given(rate) if rate is not None else given()
    return given


def _clipped(pairs: list[Any], clip: Any) -> list[Any]:
    if callable(clip):
        return list(clip(pairs))
    kept = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in kept], clip)
    return list(zip(gradients, [variable for _, variable in kept]))
