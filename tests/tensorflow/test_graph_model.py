"""Graph models: what the compiler takes from TensorFlow, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow.compat.v1 as tf

from gemini import GeminiCompiler, GeminiConfig, pipeline
from gemini.errors import ConfigError
from gemini.tensorflow import entry

CONFIG = GeminiConfig(mode=pipeline, pipeline_degree=2, accum_degree=2, quiet=True, device_mapping={
    "stage_0": {"shard_0": "/device:CPU:0"}, "stage_1": {"shard_0": "/device:CPU:1"}})  # fmt: skip


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Undo what a test installs."""
    tf.enable_resource_variables()
    with tf.Graph().as_default():
        yield
    entry.uninstall()


def model(features: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """One layer and its loss."""
    weight = tf.get_variable("weight", [3, 2], initializer=tf.ones_initializer())
    logits = features @ weight
    return logits, tf.reduce_mean(tf.square(logits - labels))


def _train(function: object) -> list[float]:
    assert callable(function)
    features, labels = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 2])
    _, loss = function(features, labels)
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    feed = {features: [[1, 2, 3], [3, 2, 1]], labels: [[1, 0], [0, 1]]}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return [float(session.run([loss, train], feed)[0]) for _ in range(4)]


def test_a_compiled_function_trains_as_the_function() -> None:
    with tf.Graph().as_default():
        alone = _train(model)
    compiled = GeminiCompiler().compiler(model, config=CONFIG)
    assert entry.is_installed()
    assert _train(compiled) == pytest.approx(alone, rel=1e-6)


def test_without_workers_the_function_is_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert GeminiCompiler().compiler(model, config=GeminiConfig()) is model
    assert "model runs in this process: the configuration requests no workers" in capsys.readouterr().err
    assert not entry.is_installed()


def test_a_function_without_tensors_is_refused() -> None:
    compiled = GeminiCompiler().compiler(lambda features: 3.0, config=CONFIG)
    with pytest.raises(ConfigError, match="returned float, without any tensor of a graph"):
        compiled(1)


def test_a_session_made_before_is_refused() -> None:
    with tf.Session(), pytest.raises(ConfigError, match=r"call the compiler before tf\.Session"):
        GeminiCompiler().compiler(model, config=CONFIG)


def test_an_unknown_device_and_a_wrong_configuration_are_refused() -> None:
    unknown = GeminiConfig(device_mapping={"stage_0": {"shard_0": "vulkan:0"}})
    with pytest.raises(ConfigError, match="'vulkan:0' is not a device of TensorFlow"):
        GeminiCompiler().compiler(model, config=unknown)
    with pytest.raises(ConfigError, match="config is a GeminiConfig, not dict"):
        GeminiCompiler().compiler(model, config={"mode": "pipeline"})  # type: ignore[arg-type]
