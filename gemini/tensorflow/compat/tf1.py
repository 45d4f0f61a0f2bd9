"""tf1: the module `tensorflow` as TensorFlow 1 spelled it.

Names are those of `tf.compat.v1`, with `tf.contrib`, `tf.estimator`, `tf.layers`, `tf.nn.rnn_cell` and `tf.keras` (of
Keras 2, from the package tf_keras), which that module has lost or lends to Keras 3.
"""

from __future__ import annotations

from typing import Any

from gemini.tensorflow.compat.lazy_names import LEGACY, LayeredNames, lazy_names

_PACKAGE = "gemini.tensorflow.compat"
_OWN = {
    "contrib": f"{_PACKAGE}.contrib",
    "estimator": f"{_PACKAGE}.estimator_names",
    "layers": f"{LEGACY}.__internal__.legacy.layers",
    "keras": LEGACY,
    "nn": f"{_PACKAGE}.tf1:_nn",
}
_nn = LayeredNames("tensorflow.nn", {"rnn_cell": f"{LEGACY}.__internal__.legacy.rnn_cell"}, "tensorflow.compat.v1:nn")
_lookup = lazy_names("tf", _OWN, ("tensorflow.compat.v1", "tensorflow"))


def __getattr__(name: str) -> Any:
    """Return a name of TensorFlow 1, and keep it."""
    value = _lookup(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    import tensorflow.compat.v1 as tf

    return sorted({*_OWN, *dir(tf)} - {"_nn"})
