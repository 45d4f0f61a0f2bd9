"""What parts of tf.contrib have in small: argument scopes, losses and metrics, optimizers, TPUs of a cloud."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gemini.tensorflow.compat.lazy_names import tf

_Defaults = dict[Any, dict[str, Any]]
_scope: ContextVar[_Defaults | None] = ContextVar("argument_scope", default=None)


# ── tf.contrib.framework ───────────────────────────────────────────────────────────────────────────────────────────
def add_arg_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `arg_scope` give default arguments to a function."""

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**(_scope.get() or {}).get(scoped, {}), **kwargs})

    return scoped


@contextmanager
def arg_scope(functions: Sequence[Callable[..., Any]] | _Defaults, **kwargs: Any) -> Iterator[_Defaults]:
    """Give default arguments to functions with `add_arg_scope`; a scope that was kept can be entered again."""
    if isinstance(functions, dict):
        inner = dict(functions)
    else:
        inner = dict(_scope.get() or {})
        for one in functions:
            inner[one] = {**inner.get(one, {}), **kwargs}
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)


# ── tf.contrib.metrics, tf.contrib.seq2seq ─────────────────────────────────────────────────────────────────────────
def accuracy(predictions: Any, labels: Any, weights: Any = None, name: str | None = None) -> Any:
    """Return the share of `predictions` that equal `labels`, in this batch."""
    with tf.name_scope(name, "accuracy", [predictions, labels]):
        hits = tf.cast(tf.equal(predictions, labels), tf.float32)
        if weights is None:
            return tf.reduce_mean(hits)
        return tf.reduce_sum(hits * weights) / tf.reduce_sum(weights)


def sequence_loss(
    logits: Any, targets: Any, weights: Any, average_across_timesteps: bool = True, average_across_batch: bool = True,
    softmax_loss_function: Any = None, name: str | None = None,
) -> Any:  # fmt: skip
    """Return the weighted cross-entropy of `logits` [batch, time, classes], averaged over time and batch."""
    with tf.name_scope(name, "sequence_loss", [logits, targets, weights]):
        flat_logits, flat_targets = tf.reshape(logits, [-1, tf.shape(logits)[2]]), tf.reshape(targets, [-1])
        compute = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = compute(labels=flat_targets, logits=flat_logits) * tf.reshape(weights, [-1])
        if average_across_timesteps and average_across_batch:
            return tf.reduce_sum(losses) / (tf.reduce_sum(weights) + 1e-12)
        losses = tf.reshape(losses, tf.shape(logits)[:2])
        if not average_across_batch and not average_across_timesteps:
            return losses
        axis = [0] if average_across_batch else [1]
        return tf.reduce_sum(losses, axis=axis) / (tf.reduce_sum(weights, axis=axis) + 1e-12)


# ── tf.contrib.opt ─────────────────────────────────────────────────────────────────────────────────────────────────
def extend_with_decoupled_weight_decay(base: type) -> Callable[..., Any]:
    """Return an optimizer class that subtracts `weight_decay` times a variable from it, and then steps as `base`."""

    class Decayed(base):  # type: ignore[misc]
        def __init__(self, weight_decay: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._weight_decay = weight_decay

        def apply_gradients(
            self, grads_and_vars: Any, global_step: Any = None, name: str | None = None,
            decay_var_list: Sequence[Any] | None = None,
        ) -> Any:  # fmt: skip
            pairs = list(grads_and_vars)
            chosen = None if decay_var_list is None else {id(one) for one in decay_var_list}
            decays = [
                tf.assign_sub(variable, tf.cast(self._weight_decay, variable.dtype.base_dtype) * variable)
                for gradient, variable in pairs
                if gradient is not None and (chosen is None or id(variable) in chosen)
            ]
            with tf.control_dependencies(decays):
                return super().apply_gradients(pairs, global_step=global_step, name=name)

    Decayed.__name__ = Decayed.__qualname__ = f"{base.__name__}WithDecoupledWeightDecay"
    return Decayed


def AdamWOptimizer(*args: Any, **kwargs: Any) -> Any:
    """Return Adam with decoupled weight decay."""
    return extend_with_decoupled_weight_decay(tf.train.AdamOptimizer)(*args, **kwargs)


def MomentumWOptimizer(*args: Any, **kwargs: Any) -> Any:
    """Return momentum with decoupled weight decay."""
    return extend_with_decoupled_weight_decay(tf.train.MomentumOptimizer)(*args, **kwargs)


# ── tf.contrib.cluster_resolver ────────────────────────────────────────────────────────────────────────────────────
class TPUClusterResolver:
    """Refuses: scripts make one only where they train on TPUs of a cloud."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        raise NotImplementedError(
            f"TPUClusterResolver({given}): TPUs of a cloud are not reached through TensorFlow 1's interface\n"
            "    → run the script without them, as with --use_tpu=false"
        )
