"""tf.contrib: the parts of it that the layer has, one module each."""

from __future__ import annotations

from gemini.tensorflow.compat.lazy_names import LEGACY, lazy_names

PARTS = ("cluster_resolver", "data", "framework", "layers", "metrics", "opt", "rnn", "seq2seq", "tpu", "training")

__getattr__ = lazy_names(
    "tf.contrib", {**{part: f"gemini.tensorflow.compat.contrib_{part}" for part in PARTS}, "keras": LEGACY}
)
