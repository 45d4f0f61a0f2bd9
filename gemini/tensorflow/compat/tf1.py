"""tf1: the module `tensorflow` as TensorFlow 1 spelled it.

Names are those of `tf.compat.v1`, with `tf.contrib`, `tf.estimator`, `tf.layers`, `tf.nn.rnn_cell` and `tf.keras` (of
Keras 2, from the package tf_keras), which that module has lost or lends to Keras 3.
"""

from __future__ import annotations

from typing import Any

from gemini.tensorflow.compat.lazy_names import LEGACY, NameTable

_PACKAGE = "gemini.tensorflow.compat"
_SPECIFICATIONS = ("EstimatorSpec", "EvalSpec", "ModeKeys", "TrainSpec", "WarmStartSettings")
_ESTIMATOR = {
    "Estimator": f"{_PACKAGE}.estimator:Estimator",
    "RunConfig": f"{_PACKAGE}.run_config:RunConfig",
    "inputs": f"{_PACKAGE}.estimator_inputs",
    "tpu": f"{_PACKAGE}.contrib:tpu",
    "train_and_evaluate": f"{_PACKAGE}.train_and_evaluate:train_and_evaluate",
    **{name: f"{_PACKAGE}.estimator_spec:{name}" for name in _SPECIFICATIONS},
}
_OWN = {
    "contrib": f"{_PACKAGE}.contrib",
    "layers": f"{LEGACY}.__internal__.legacy.layers",
    "keras": LEGACY,
}
_names = NameTable("tf", _OWN, ("tensorflow.compat.v1", "tensorflow"))
estimator = NameTable("tf.estimator", _ESTIMATOR)
nn = NameTable("tf.nn", {"rnn_cell": f"{LEGACY}.__internal__.legacy.rnn_cell"}, ("tensorflow.compat.v1:nn",))


def __getattr__(name: str) -> Any:
    """Return a name of TensorFlow 1, and keep it."""
    value = getattr(_names, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*dir(_names), "estimator", "nn"})
