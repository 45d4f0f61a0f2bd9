"""tf.contrib of the compatibility layer: values, names of variables, scopes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tensorflow.compat import v1

from gemini.tensorflow.compat import tf1 as tf

X = np.random.RandomState(0).randn(6, 4, 5).astype("float32")
layers = tf.contrib.layers


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    v1.enable_resource_variables()
    with v1.Graph().as_default():
        yield


def run(value: Any, **settings: Any) -> Any:
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session.run(value, **settings)


def names() -> list[str]:
    return [one.op.name for one in tf.global_variables()]


@pytest.mark.parametrize("axis", [1, -1])
def test_layer_norm(axis: int) -> None:
    axes = (1, 2) if axis == 1 else (2,)
    expected = (X - X.mean(axes, keepdims=True)) / np.sqrt(X.var(axes, keepdims=True))
    with tf.variable_scope("a"):
        value = layers.layer_norm(X, begin_norm_axis=axis)
        layers.layer_norm(X, scope="named")
        layers.layer_norm(X)
    assert run(value) == pytest.approx(expected, abs=1e-5)
    prefixes = ("a/LayerNorm", "a/named", "a/LayerNorm_1")
    assert names() == [f"{prefix}/{part}" for prefix in prefixes for part in ("beta", "gamma")]


def test_dense_and_convolution_layers() -> None:
    out = layers.fully_connected(X, 3, weights_initializer=tf.ones_initializer())
    assert run(out) == pytest.approx(np.repeat(np.maximum(X.sum(-1, keepdims=True), 0), 3, -1), abs=1e-5)
    image = layers.conv2d(X[..., None], 2, 3, stride=2, normalizer_fn=layers.batch_norm)
    assert image.shape.as_list() == [6, 2, 3, 2]
    assert layers.flatten(layers.max_pool2d(image, 2)).shape.as_list() == [6, 2]
    layers.linear(X[:, 0], 2, scope="head", weights_regularizer=layers.l2_regularizer(0.1))
    assert names() == [
        "fully_connected/weights", "fully_connected/biases", "Conv/weights", "Conv/BatchNorm/beta",
        "Conv/BatchNorm/moving_mean", "Conv/BatchNorm/moving_variance", "head/weights", "head/biases",
    ]  # fmt: skip
    assert len(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)) == 1
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 2


def test_batch_norm_updates_its_averages_and_uses_them() -> None:
    training = tf.placeholder(tf.bool, [])
    flat = X.reshape(-1, 5)
    out = layers.batch_norm(flat, decay=0.5, is_training=training, updates_collections=None, scope="bn")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        first = session.run(out, {training: True})
        mean, variance = session.run(
            ["bn/moving_mean/Read/ReadVariableOp:0", "bn/moving_variance/Read/ReadVariableOp:0"]
        )
        second = session.run(out, {training: False})
    assert first == pytest.approx((flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3), abs=1e-4)
    assert mean == pytest.approx(flat.mean(0) / 2, abs=1e-5)
    assert variance == pytest.approx((1 + flat.var(0)) / 2, abs=1e-5)
    assert second == pytest.approx((flat - mean) / np.sqrt(variance + 1e-3), abs=1e-4)


def test_argument_scopes() -> None:
    framework = tf.contrib.framework
    with framework.arg_scope([layers.fully_connected], activation_fn=None, biases_initializer=None) as kept:
        assert run(layers.fully_connected(X, 2)).min() < 0
    with framework.arg_scope(kept):
        layers.fully_connected(X, 2, scope="again")
    layers.fully_connected(X, 2, scope="outside")
    assert "again/biases" not in names()
    assert "outside/biases" in names()


def test_optimize_loss() -> None:
    weight = tf.get_variable("weight", [2], initializer=tf.ones_initializer())
    step = tf.train.get_or_create_global_step()
    train = layers.optimize_loss(tf.reduce_sum(weight**2), step, 0.1, "SGD", clip_gradients=1.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(train) == pytest.approx(2.0)
        assert session.run(weight) == pytest.approx(1 - 0.1 / np.sqrt(2) * np.ones(2), rel=1e-6)
        assert session.run(step) == 1


def test_decoupled_weight_decay() -> None:
    weight = tf.get_variable("weight", [2], initializer=tf.ones_initializer())
    train = tf.contrib.opt.MomentumWOptimizer(0.01, learning_rate=0.1, momentum=0.0).minimize(tf.reduce_sum(3 * weight))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        assert session.run(weight) == pytest.approx([1 - 0.01 - 0.3] * 2, rel=1e-6)


def test_recurrent_cells_and_sequence_loss() -> None:
    cell = tf.contrib.rnn.MultiRNNCell([tf.contrib.rnn.BasicLSTMCell(5) for _ in range(2)])
    outputs, _ = tf.nn.dynamic_rnn(cell, X, dtype=tf.float32)
    targets = np.arange(24).reshape(6, 4) % 5
    weights = np.ones((6, 4), "float32")
    weights[:, 2:] = 0
    loss = tf.contrib.seq2seq.sequence_loss(outputs, targets, weights)
    value, logits = run([loss, outputs])
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = -np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    assert value == pytest.approx(picked[:, :2].mean(), rel=1e-5)


def test_hyper_parameters() -> None:
    given = tf.contrib.training.HParams(rate=0.1, sizes=[1, 2], name="a", flag=False)
    given.parse("rate=1e-3,sizes=[3,4],flag=true")
    assert given.values() == {"rate": 1e-3, "sizes": [3, 4], "name": "a", "flag": True}
    assert "rate" in given
    assert given.rate == 1e-3
    with pytest.raises(ValueError, match="Unknown hyperparameter: other"):
        given.parse("other=1")
    with pytest.raises(ValueError, match="cannot replace"):
        given.parse("rate=fast")
    with pytest.raises(AttributeError, match="no hyper-parameter 'absent'"):
        _ = given.absent


def test_the_names_that_tf_compat_v1_lost() -> None:
    assert tf.nn.rnn_cell.BasicLSTMCell is tf.contrib.rnn.BasicLSTMCell
    assert tf.nn.relu is v1.nn.relu
    assert tf.layers.dense(X, 2).shape.as_list() == [6, 4, 2]
    assert tf.keras.layers.Dense.__module__.startswith("tf_keras.")
    assert {"Session", "contrib", "estimator", "layers"} <= set(dir(tf))
    assert "dynamic_rnn" in dir(tf.nn)
