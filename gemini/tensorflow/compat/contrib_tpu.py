"""tf.contrib.tpu: the estimator of TPU scripts, which runs here on other devices."""

from __future__ import annotations

from gemini.tensorflow.compat.lazy_names import lazy_names

_PACKAGE = "gemini.tensorflow.compat"

__getattr__ = lazy_names(
    "tf.contrib.tpu",
    {
        "CrossShardOptimizer": "tensorflow.compat.v1:tpu.CrossShardOptimizer",
        "InputPipelineConfig": f"{_PACKAGE}.run_config:InputPipelineConfig",
        "RunConfig": f"{_PACKAGE}.run_config:TPURunConfig",
        "TPUConfig": f"{_PACKAGE}.run_config:TPUConfig",
        "TPUEstimator": f"{_PACKAGE}.tpu_estimator:TPUEstimator",
        "TPUEstimatorSpec": f"{_PACKAGE}.estimator_spec:TPUEstimatorSpec",
        "bfloat16_scope": "tensorflow.compat.v1:tpu.bfloat16_scope",
    },
)
