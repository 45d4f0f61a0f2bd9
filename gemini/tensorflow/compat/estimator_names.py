"""tf.estimator: a model function with its training, evaluation and prediction loops."""

from __future__ import annotations

from gemini.tensorflow.compat.lazy_names import lazy_names

_PACKAGE = "gemini.tensorflow.compat"

__getattr__ = lazy_names(
    "tf.estimator",
    {
        "Estimator": f"{_PACKAGE}.estimator:Estimator",
        "EstimatorSpec": f"{_PACKAGE}.estimator_spec:EstimatorSpec",
        "EvalSpec": f"{_PACKAGE}.estimator_spec:EvalSpec",
        "ModeKeys": f"{_PACKAGE}.estimator_spec:ModeKeys",
        "RunConfig": f"{_PACKAGE}.run_config:RunConfig",
        "TrainSpec": f"{_PACKAGE}.estimator_spec:TrainSpec",
        "WarmStartSettings": f"{_PACKAGE}.estimator_spec:WarmStartSettings",
        "inputs": f"{_PACKAGE}.estimator_inputs",
        "tpu": f"{_PACKAGE}.contrib_tpu",
        "train_and_evaluate": f"{_PACKAGE}.train_and_evaluate:train_and_evaluate",
    },
)
