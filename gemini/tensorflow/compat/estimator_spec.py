"""What a model function of an estimator returns, and the specifications of `train_and_evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemini.tensorflow.compat.lazy_names import tf


class ModeKeys:
    """The modes in which a model function is called."""

    TRAIN, EVAL, PREDICT = "train", "eval", "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """The operations of one mode; each mode needs its own."""

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: dict[str, Any] | None = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[Any] | None = ()
    training_hooks: Sequence[Any] | None = ()
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] | None = ()
    prediction_hooks: Sequence[Any] | None = ()

    def __post_init__(self) -> None:
        _check(self)
        if self.loss is not None:
            object.__setattr__(self, "loss", _scalar(self.loss))

    def _replace(self, **values: Any) -> EstimatorSpec:
        return replace(self, **values)


def _check(spec: EstimatorSpec | TPUEstimatorSpec) -> None:
    if spec.mode == ModeKeys.TRAIN and spec.train_op is None:
        raise ValueError("Missing train_op.")
    if spec.mode in (ModeKeys.TRAIN, ModeKeys.EVAL) and spec.loss is None:
        raise ValueError("Missing loss.")
    if spec.mode == ModeKeys.PREDICT and spec.predictions is None:
        raise ValueError("Missing predictions.")


def _scalar(loss: Any) -> Any:
    loss = tf.convert_to_tensor(loss)
    if loss.shape.num_elements() not in (None, 1):
        raise ValueError(f"Loss must be scalar, given: {loss}")
    return tf.reshape(loss, []) if loss.shape.ndims not in (None, 0) else loss


@dataclass(frozen=True)
class TPUEstimatorSpec:
    """The operations of one mode of a TPU script; metrics are a function and its tensors."""

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metrics: Any = None
    export_outputs: Any = None
    scaffold_fn: Callable[[], Any] | None = None
    host_call: Any = None
    training_hooks: Sequence[Any] | None = ()
    evaluation_hooks: Sequence[Any] | None = ()
    prediction_hooks: Sequence[Any] | None = ()

    def __post_init__(self) -> None:
        _check(self)

    def as_estimator_spec(self) -> EstimatorSpec:
        """Return the specification of an estimator without TPUs: metrics are computed, host calls run each step."""
        train_op = self.train_op
        if self.mode == ModeKeys.TRAIN and self.host_call is not None:
            train_op = tf.group(train_op, _call(self.host_call))
        return EstimatorSpec(
            mode=self.mode,
            predictions=self.predictions,
            loss=self.loss,
            train_op=train_op,
            eval_metric_ops=None if self.eval_metrics is None else _call(self.eval_metrics),
            export_outputs=self.export_outputs,
            training_hooks=self.training_hooks,
            scaffold=self.scaffold_fn() if self.scaffold_fn else None,
            evaluation_hooks=self.evaluation_hooks,
            prediction_hooks=self.prediction_hooks,
        )


def _call(function_and_tensors: Any) -> Any:
    function, tensors = function_and_tensors
    return function(**tensors) if isinstance(tensors, dict) else function(*tensors)


@dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains on."""

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Any] = ()
    saving_listeners: Sequence[Any] = ()


@dataclass(frozen=True)
class EvalSpec:
    """What `train_and_evaluate` evaluates on, after a checkpoint and at most every `throttle_secs`."""

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] = ()
    exporters: Any = None
    start_delay_secs: int = 120
    throttle_secs: int = 600

    def __post_init__(self) -> None:
        if self.exporters:
            raise NotImplementedError(
                "EvalSpec(exporters=…): the compatibility layer exports no models\n"
                "    → leave them out, and export from the last checkpoint with tf.compat.v1.saved_model"
            )


@dataclass(frozen=True)
class WarmStartSettings:
    """The checkpoint that a new model's variables start from."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: dict[str, Any] | None = field(default=None)
    var_name_to_prev_var_name: dict[str, str] | None = field(default=None)
