"""TPUEstimator: the estimator of TPU scripts, on other devices; the batch size is a hyper-parameter of each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini.tensorflow.compat.estimator import Estimator
from gemini.tensorflow.compat.estimator_spec import ModeKeys
from gemini.tensorflow.compat.run_config import TPURunConfig

_BATCH_SIZE = "batch_size"


class TPUEstimator(Estimator):
    """An estimator whose functions find `params["batch_size"]`, that of the mode; it does not drive TPUs."""

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        warm_start_from: Any = None,
        **on_tpu: Any,
    ) -> None:
        if use_tpu:
            raise NotImplementedError(
                "TPUEstimator(use_tpu=True): the compatibility layer does not drive TPUs\n"
                "    → run the script without them, as with --use_tpu=false"
            )
        unknown = sorted(on_tpu.keys() - _ONLY_ON_TPU)
        if unknown:
            raise TypeError(f"TPUEstimator() got an unexpected keyword argument {unknown[0]!r}")
        if params is not None and _BATCH_SIZE in params:
            raise ValueError(
                "batch_size cannot be in params: TPUEstimator sets it from train_batch_size and the others"
            )
        super().__init__(model_fn, model_dir, TPURunConfig() if config is None else config, params, warm_start_from)
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }

    def _mode_params(self, mode: str) -> Any:
        params = self.params
        if self._batch_sizes[mode] is not None:
            params[_BATCH_SIZE] = self._batch_sizes[mode]
        return params


_ONLY_ON_TPU = frozenset(
    {"batch_axis", "embedding_config_spec", "eval_on_tpu", "export_saved_model_api_version", "export_to_cpu",
     "export_to_tpu"}
)  # fmt: skip
"""Options that say how a TPU is used; without one they have no meaning."""
