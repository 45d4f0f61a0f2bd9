"""tf.contrib.seq2seq: the loss of sequences."""

from __future__ import annotations

from typing import Any

from gemini.tensorflow.compat.lazy_names import tf


def sequence_loss(
    logits: Any,
    targets: Any,
    weights: Any,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Any = None,
    name: str | None = None,
) -> Any:
    """Return the weighted cross-entropy of `logits` [batch, time, classes], averaged over time and batch."""
    with tf.name_scope(name, "sequence_loss", [logits, targets, weights]):
        classes = tf.shape(logits)[2]
        flat_logits, flat_targets = tf.reshape(logits, [-1, classes]), tf.reshape(targets, [-1])
        if softmax_loss_function is None:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=flat_targets, logits=flat_logits)
        else:
            losses = softmax_loss_function(labels=flat_targets, logits=flat_logits)
        losses = losses * tf.reshape(weights, [-1])
        if average_across_timesteps and average_across_batch:
            return tf.reduce_sum(losses) / (tf.reduce_sum(weights) + 1e-12)
        losses = tf.reshape(losses, tf.shape(logits)[:2])
        if average_across_batch:
            return tf.reduce_sum(losses, axis=[0]) / (tf.reduce_sum(weights, axis=[0]) + 1e-12)
        if average_across_timesteps:
            return tf.reduce_sum(losses, axis=[1]) / (tf.reduce_sum(weights, axis=[1]) + 1e-12)
        return losses
