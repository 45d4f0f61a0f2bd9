"""Estimators of the compatibility layer: training, checkpoints, evaluation and prediction as in TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow.compat import v1

from gemini.tensorflow.compat import tf1 as tf

X = np.random.RandomState(0).rand(24, 3).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Variables as resources, as the layer's graph mode sets them."""
    v1.enable_resource_variables()
    with v1.Graph().as_default():
        yield


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
    """A linear model."""
    weight = tf.get_variable("weight", [3, 1], initializer=tf.zeros_initializer())
    outputs = tf.matmul(features["x"], weight)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": outputs})
    loss = tf.losses.mean_squared_error(labels, outputs)
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"error": tf.metrics.mean_absolute_error(labels, outputs)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    train = tf.train.GradientDescentOptimizer(params["rate"])
    step = train.minimize(loss, global_step=tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=step)


def batches(repeat: int | None = None) -> Callable[[], Any]:
    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(8).repeat(repeat)

    return input_fn


def reference(steps: int) -> np.ndarray:
    """The weights after some steps of gradient descent, by hand."""
    weight = np.zeros((3, 1))
    for at in range(steps):
        x, y = X[8 * (at % 3) :][:8], Y[8 * (at % 3) :][:8]
        weight -= 0.3 * 2 / 8 * x.T @ (x @ weight - y)
    return weight


def make(folder: Path, **config: Any) -> Any:
    return tf.estimator.Estimator(
        model_fn, str(folder), tf.estimator.RunConfig(**config) if config else None, params={"rate": 0.3}
    )


def test_training_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    make(tmp_path).train(batches(), steps=4)
    estimator = make(tmp_path)
    estimator.train(batches(), steps=3)
    # The input starts again with every call.
    weight = reference(4)
    for at in range(3):
        x, y = X[8 * at :][:8], Y[8 * at :][:8]
        weight -= 0.3 * 2 / 8 * x.T @ (x @ weight - y)
    assert estimator.get_variable_value("weight") == pytest.approx(weight, rel=1e-5)
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-7")
    assert set(estimator.get_variable_names()) == {"weight", "global_step"}


def test_max_steps_counts_earlier_training(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    for _ in range(2):
        estimator.train(batches(), max_steps=5)
    assert estimator.get_variable_value("global_step") == 5
    assert estimator.get_variable_value("weight") == pytest.approx(reference(5), rel=1e-5)


def test_training_ends_with_the_input(tmp_path: Path) -> None:
    assert make(tmp_path).train(batches(2)).get_variable_value("global_step") == 6


def test_evaluation_and_prediction(tmp_path: Path) -> None:
    estimator = make(tmp_path)
    with pytest.raises(ValueError, match="Could not find trained model"):
        estimator.evaluate(batches(1))
    estimator.train(batches(), steps=2)
    outputs = X @ reference(2)
    result = estimator.evaluate(batches(1))
    assert result["loss"] == pytest.approx(np.mean((outputs - Y) ** 2), rel=1e-4)
    assert result["error"] == pytest.approx(np.mean(np.abs(outputs - Y)), rel=1e-4)
    assert result["global_step"] == 2
    assert estimator.evaluate(batches(None), steps=3) == pytest.approx(result)
    assert list((tmp_path / "eval").iterdir())
    predicted = [one["y"] for one in estimator.predict(batches(1))]
    assert np.stack(predicted) == pytest.approx(outputs, rel=1e-4)
    whole = list(estimator.predict(batches(1), yield_single_examples=False))
    assert [one["y"].shape for one in whole] == [(8, 1)] * 3
    with pytest.raises(ValueError, match="at least one output"):
        next(estimator.predict(batches(1), predict_keys=["z"]))


def test_train_and_evaluate(tmp_path: Path) -> None:
    estimator = make(tmp_path, save_checkpoints_steps=2)
    train = tf.estimator.TrainSpec(batches(), max_steps=6)
    check = tf.estimator.EvalSpec(batches(1), steps=None, throttle_secs=0, start_delay_secs=0)
    metrics, exports = tf.estimator.train_and_evaluate(estimator, train, check)
    assert metrics["global_step"] == 6
    assert metrics["loss"] == pytest.approx(np.mean((X @ reference(6) - Y) ** 2), rel=1e-4)
    assert exports == []
    assert {path.name for path in tmp_path.glob("*.index")} == {f"model.ckpt-{at}.index" for at in (0, 2, 4, 6)}


def test_warm_start(tmp_path: Path) -> None:
    make(tmp_path / "a").train(batches(), steps=3)
    started = tf.estimator.Estimator(
        model_fn, str(tmp_path / "b"), params={"rate": 1e-9}, warm_start_from=str(tmp_path / "a")
    )
    started.train(batches(), steps=1)
    assert started.get_variable_value("weight") == pytest.approx(reference(3), rel=1e-5)


def test_hooks_run_and_stop(tmp_path: Path) -> None:
    seen: list[float] = []

    class Hook(v1.train.SessionRunHook):  # type: ignore[misc]
        def before_run(self, context: Any) -> Any:
            return v1.train.SessionRunArgs("weight/Read/ReadVariableOp:0")

        def after_run(self, context: Any, values: Any) -> None:
            seen.append(values.results.sum())
            if len(seen) == 2:
                context.request_stop()

    make(tmp_path).train(batches(), hooks=[Hook()])
    assert len(seen) == 2


def test_a_tpu_estimator_sets_the_batch_size_of_each_mode(tmp_path: Path) -> None:
    sizes: dict[str, int] = {}

    def input_fn(params: dict[str, Any], mode: str) -> Any:
        sizes[mode] = params["batch_size"]
        return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat(2).batch(params["batch_size"], True)

    def tpu_model(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
        spec = model_fn(features, labels, mode, params)

        def metrics(labels: Any) -> dict[str, Any]:
            return {"label": tf.metrics.mean(labels)}

        return tf.contrib.tpu.TPUEstimatorSpec(
            mode,
            loss=spec.loss,
            train_op=spec.train_op,
            predictions=spec.predictions,
            eval_metrics=(metrics, [labels]) if mode == "eval" else None,
            scaffold_fn=tf.train.Scaffold,
        )

    config = tf.contrib.tpu.RunConfig(
        model_dir=str(tmp_path), tpu_config=tf.contrib.tpu.TPUConfig(iterations_per_loop=3, num_shards=8)
    )
    estimator = tf.contrib.tpu.TPUEstimator(
        tpu_model, config=config, params={"rate": 0.3}, use_tpu=False,
        train_batch_size=8, eval_batch_size=6, predict_batch_size=4,
    )  # fmt: skip
    estimator.train(input_fn, max_steps=2)
    assert estimator.evaluate(input_fn, steps=4)["label"] == pytest.approx(Y.mean(), rel=1e-5)
    assert len(list(estimator.predict(input_fn))) == 48
    assert sizes == {"train": 8, "eval": 6, "infer": 4}
    assert estimator.get_variable_value("weight") == pytest.approx(reference(2), rel=1e-5)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: tf.contrib.tpu.TPUEstimator(model_fn, "x"), "does not drive TPUs"),
        (lambda: tf.contrib.cluster_resolver.TPUClusterResolver("t"), "use_tpu=false"),
        (lambda: tf.contrib.tpu.RunConfig(master="grpc://there"), "has no remote masters"),
        (lambda: tf.estimator.RunConfig(train_distribute=1), "--mode pipeline"),
        (lambda: tf.estimator.EvalSpec(batches(), exporters=[1]), "exports no models"),
        (lambda: tf.estimator.DNNClassifier, "tf.estimator.DNNClassifier is not in Gemini's compatibility layer"),
        (lambda: tf.contrib.slim, "it has cluster_resolver, data"),
        (lambda: tf.no_such_name, "write this part with tf.compat.v1"),
    ],
)
def test_what_is_missing_is_refused(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises((NotImplementedError, AttributeError), match=message):
        make_it()


def test_specifications_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Missing train_op\."):
        tf.estimator.EstimatorSpec("train", loss=tf.constant(1.0))
    with pytest.raises(ValueError, match=r"Missing predictions\."):
        tf.estimator.EstimatorSpec("infer")
    with pytest.raises(ValueError, match="Loss must be scalar"):
        tf.estimator.EstimatorSpec("eval", loss=tf.zeros([2]))
    with pytest.raises(ValueError, match="both"):
        tf.estimator.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
