"""Classic models: perceptron, mnist CNN, batch-norm CNN, LSTM, wide embeddings; each returns placeholders and loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow.compat.v1 as tf


@dataclass
class Case:
    """A built model: its loss and logits, and a function from sample count and seed to feeds."""

    loss: tf.Tensor
    logits: tf.Tensor
    batch: Callable[[int, int], dict[tf.Tensor, object]]
    extra: list[tf.Operation] = field(default_factory=list)


def _images(inputs: tf.Tensor, labels: tf.Tensor, classes: int) -> Callable[[int, int], dict[tf.Tensor, object]]:
    def batch(count: int, seed: int) -> dict[tf.Tensor, object]:
        random = np.random.RandomState(seed)
        shape = [count, *inputs.shape.as_list()[1:]]
        return {inputs: random.rand(*shape), labels: random.randint(0, classes, count)}

    return batch


def mlp() -> Case:
    """Three layers with dropout and weight decay."""
    x, y = tf.placeholder(tf.float32, [None, 12], "x"), tf.placeholder(tf.int64, [None], "y")
    h = x
    for at, width in enumerate((16, 16)):
        w = tf.get_variable(f"w{at}", [h.shape[1], width], initializer=tf.glorot_uniform_initializer())
        b = tf.get_variable(f"b{at}", [width], initializer=tf.zeros_initializer())
        h = tf.nn.dropout(tf.nn.relu(tf.matmul(h, w) + b), rate=0.2)
    logits = tf.matmul(h, tf.get_variable("w2", [16, 4]))
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    decay = 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables()])
    return Case(loss + decay, logits, _images(x, y, 4))


def mnist_cnn() -> Case:
    """Two convolutions of `tf.layers`, dropout, `tf.losses`."""
    x, y = tf.placeholder(tf.float32, [None, 196], "x"), tf.placeholder(tf.int64, [None], "y")
    h = tf.reshape(x, [-1, 14, 14, 1])
    h = tf.layers.conv2d(h, 4, 5, padding="same", activation=tf.nn.relu)
    h = tf.layers.max_pooling2d(h, 2, 2)
    h = tf.layers.conv2d(h, 8, 5, padding="same", activation=tf.nn.relu)
    h = tf.layers.max_pooling2d(h, 2, 2)
    h = tf.layers.dense(tf.layers.flatten(h), 32, activation=tf.nn.relu)
    h = tf.layers.dropout(h, 0.4, training=True)
    logits = tf.layers.dense(h, 10)
    return Case(tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits), logits, _images(x, y, 10))


def batch_norm_cnn() -> Case:
    """Fused batch normalization of images, moments of rows, moving averages."""
    x, y = tf.placeholder(tf.float32, [None, 8, 8, 3], "x"), tf.placeholder(tf.int64, [None], "y")
    h = tf.layers.conv2d(x, 4, 3, padding="same")
    h = tf.nn.relu(tf.layers.batch_normalization(h, training=True))
    h = tf.layers.conv2d(h, 4, 3, strides=2, padding="same")
    h = tf.layers.dense(tf.layers.flatten(h), 8)
    h = tf.nn.relu(tf.layers.batch_normalization(h, training=True))
    logits = tf.layers.dense(h, 10)
    loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
    return Case(loss, logits, _images(x, y, 10), tf.get_collection(tf.GraphKeys.UPDATE_OPS))


def lstm() -> Case:
    """Two layers of LSTM cells in one loop."""
    x, y = tf.placeholder(tf.int32, [None, 5], "x"), tf.placeholder(tf.int32, [None, 5], "y")
    h = tf.nn.embedding_lookup(tf.get_variable("table", [20, 8]), x)
    cell = tf.nn.rnn_cell.MultiRNNCell([tf.nn.rnn_cell.LSTMCell(8) for _ in range(2)])
    h, _ = tf.nn.dynamic_rnn(cell, h, dtype=tf.float32)
    logits = tf.layers.dense(h, 20)
    weights = tf.cast(tf.not_equal(y, 0), tf.float32)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    loss = tf.reduce_sum(loss * weights) / tf.reduce_sum(weights)

    def batch(count: int, seed: int) -> dict[tf.Tensor, object]:
        random = np.random.RandomState(seed)
        return {x: random.randint(0, 20, (count, 5)), y: random.randint(0, 20, (count, 5))}

    return Case(loss, logits, batch)


def wide_embeddings() -> Case:
    """Several tables with sparse gradients, means of looked-up rows, a cross and two dense layers."""
    ids, y = tf.placeholder(tf.int32, [None, 6], "ids"), tf.placeholder(tf.float32, [None], "y")
    tables = [tf.get_variable(f"table_{at}", [30, 8]) for at in range(3)]
    parts = [tf.reduce_mean(tf.nn.embedding_lookup(table, ids[:, 2 * at : 2 * at + 2]), 1)
             for at, table in enumerate(tables)]  # fmt: skip
    h = tf.concat(parts, 1)
    wide = tf.nn.embedding_lookup(tf.get_variable("wide", [30, 1]), ids)
    h = tf.layers.dense(h, 16, activation=tf.nn.relu)
    logits = tf.layers.dense(h, 1)[:, 0] + tf.reduce_sum(wide, [1, 2])
    loss = tf.losses.sigmoid_cross_entropy(multi_class_labels=y, logits=logits)

    def batch(count: int, seed: int) -> dict[tf.Tensor, object]:
        random = np.random.RandomState(seed)
        return {ids: random.randint(0, 30, (count, 6)), y: random.randint(0, 2, count)}

    return Case(loss, logits, batch)
