"""tf.contrib.metrics: streaming metrics, which are `tf.metrics` today."""

from __future__ import annotations

from typing import Any

from gemini.tensorflow.compat.lazy_names import lazy_names

_STREAMING = {
    "accuracy": "accuracy", "auc": "auc", "mean": "mean", "mean_absolute_error": "mean_absolute_error",
    "mean_iou": "mean_iou", "mean_squared_error": "mean_squared_error", "precision": "precision",
    "recall": "recall", "root_mean_squared_error": "root_mean_squared_error",
}  # fmt: skip

__getattr__ = lazy_names(
    "tf.contrib.metrics",
    {f"streaming_{name}": f"tensorflow.compat.v1:metrics.{today}" for name, today in _STREAMING.items()},
)


def accuracy(predictions: Any, labels: Any, weights: Any = None, name: str | None = None) -> Any:
    """Return the share of `predictions` that equal `labels`, in this batch."""
    from gemini.tensorflow.compat.lazy_names import tf

    with tf.name_scope(name, "accuracy", [predictions, labels]):
        hits = tf.cast(tf.equal(predictions, labels), tf.float32)
        if weights is None:
            return tf.reduce_mean(hits)
        return tf.reduce_sum(hits * weights) / tf.reduce_sum(weights)
