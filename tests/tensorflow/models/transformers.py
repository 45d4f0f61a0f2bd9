"""Transformers as TensorFlow 1 programs wrote them: an encoder pre-trained on masked words, a translator."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tests.tensorflow.models.classics import Case

RATE = 0.1
_INIT = tf.truncated_normal_initializer(stddev=0.05)


def layer_norm(x: tf.Tensor, name: str = "norm") -> tf.Tensor:
    """Normalize the last dimension."""
    with tf.variable_scope(name):
        width = x.shape[-1]
        gamma = tf.get_variable("gamma", [width], initializer=tf.ones_initializer())
        beta = tf.get_variable("beta", [width], initializer=tf.zeros_initializer())
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-6)


def dense(x: tf.Tensor, width: int, name: str, activation: object = None) -> tf.Tensor:
    """Apply a dense layer of `tf.layers`."""
    return tf.layers.dense(x, width, activation=activation, name=name, kernel_initializer=_INIT)


def gelu(x: tf.Tensor) -> tf.Tensor:
    """Apply the smooth rectifier of encoders of that time."""
    return x * 0.5 * (1.0 + tf.erf(x / tf.sqrt(2.0)))


def size_of(x: tf.Tensor) -> list[object]:
    """Return the sizes of a tensor, as tensors where they are unknown."""
    dynamic = tf.shape(x)
    return [dynamic[at] if size is None else size for at, size in enumerate(x.shape.as_list())]


def attention(x: tf.Tensor, memory: tf.Tensor, bias: tf.Tensor, heads: int) -> tf.Tensor:
    """Attend from rows of `x` to rows of `memory`; both are sequences of rows, flattened to matrices and back."""
    batch, length, width = size_of(x)
    other = size_of(memory)[1]
    each = width // heads

    def split(y: tf.Tensor, rows: object) -> tf.Tensor:
        return tf.transpose(tf.reshape(y, [batch, rows, heads, each]), [0, 2, 1, 3])

    flat = tf.reshape(x, [-1, width])
    flat_memory = flat if memory is x else tf.reshape(memory, [-1, width])
    query, key = split(dense(flat, width, "query"), length), split(dense(flat_memory, width, "key"), other)
    value = split(dense(flat_memory, width, "value"), other)
    scores = tf.matmul(query, key, transpose_b=True) * (1.0 / float(np.sqrt(each))) + bias
    weights = tf.nn.dropout(tf.nn.softmax(scores), rate=RATE)
    mixed = tf.reshape(tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3]), [batch * length, width])
    return tf.reshape(dense(mixed, width, "output"), [batch, length, width])


def block(x: tf.Tensor, memory: tf.Tensor | None, bias: tf.Tensor, outer: tf.Tensor | None, heads: int) -> tf.Tensor:
    """One layer: self-attention, attention to `memory` if there is one, feed-forward."""
    width = x.shape.as_list()[-1]
    with tf.variable_scope("self"):
        x = layer_norm(x + tf.nn.dropout(attention(x, x, bias, heads), rate=RATE))
    if memory is not None:
        with tf.variable_scope("cross"):
            x = layer_norm(x + tf.nn.dropout(attention(x, memory, outer, heads), rate=RATE))
    with tf.variable_scope("feed_forward"):
        inner = dense(dense(x, 4 * width, "wide", gelu), width, "narrow")
        return layer_norm(x + tf.nn.dropout(inner, rate=RATE))


def masked_encoder(layers: int = 4, width: int = 32, heads: int = 4, length: int = 12, words: int = 60) -> Case:
    """Masked-word and next-sentence losses on an encoder, tied to its embeddings, by gathered positions."""
    ids = tf.placeholder(tf.int32, [None, length], "input_ids")
    mask = tf.placeholder(tf.int32, [None, length], "input_mask")
    kinds = tf.placeholder(tf.int32, [None, length], "segment_ids")
    places = tf.placeholder(tf.int32, [None, 3], "masked_positions")
    labels = tf.placeholder(tf.int32, [None, 3], "masked_ids")
    weights = tf.placeholder(tf.float32, [None, 3], "masked_weights")
    follows = tf.placeholder(tf.int32, [None], "next_labels")
    table = tf.get_variable("word_embeddings", [words, width], initializer=_INIT)
    types = tf.get_variable("type_embeddings", [2, width], initializer=_INIT)
    positions = tf.get_variable("position_embeddings", [32, width], initializer=_INIT)
    h = tf.reshape(tf.gather(table, tf.reshape(ids, [-1])), [tf.shape(ids)[0], length, width])
    one_hot = tf.one_hot(tf.reshape(kinds, [-1]), 2)
    h += tf.reshape(tf.matmul(one_hot, types), [tf.shape(ids)[0], length, width])
    h += tf.reshape(tf.slice(positions, [0, 0], [length, -1]), [1, length, width])
    h = tf.nn.dropout(layer_norm(h), rate=RATE)
    ones = tf.ones([tf.shape(ids)[0], length, 1], tf.float32)
    seen = ones * tf.cast(tf.reshape(mask, [tf.shape(ids)[0], 1, length]), tf.float32)
    bias = (1.0 - tf.expand_dims(seen, 1)) * -10000.0
    for at in range(layers):
        with tf.variable_scope(f"layer_{at}"):
            h = block(h, None, bias, None, heads)
    pooled = dense(tf.squeeze(h[:, 0:1, :], 1), width, "pooler", tf.tanh)
    with tf.variable_scope("masked"):
        offsets = tf.reshape(tf.range(0, tf.shape(ids)[0]) * length, [-1, 1])
        rows = tf.gather(tf.reshape(h, [-1, width]), tf.reshape(places + offsets, [-1]))
        rows = layer_norm(dense(rows, width, "transform", gelu))
        logits = tf.matmul(rows, table, transpose_b=True)
        logits = tf.nn.bias_add(logits, tf.get_variable("bias", [words], initializer=tf.zeros_initializer()))
        logs = tf.nn.log_softmax(logits)
        each = -tf.reduce_sum(logs * tf.one_hot(tf.reshape(labels, [-1]), words), -1)
        flat = tf.reshape(weights, [-1])
        masked = tf.reduce_sum(flat * each) / (tf.reduce_sum(flat) + 1e-5)
    with tf.variable_scope("next"):
        second = tf.nn.log_softmax(dense(pooled, 2, "logits"))
        following = tf.reduce_mean(-tf.reduce_sum(tf.one_hot(follows, 2) * second, -1))

    def batch(count: int, seed: int) -> dict[tf.Tensor, object]:
        random = np.random.RandomState(seed)
        lengths = random.randint(length // 2, length + 1, (count, 1))
        return {
            ids: random.randint(0, words, (count, length)),
            mask: (np.arange(length) < lengths).astype(int),
            kinds: random.randint(0, 2, (count, length)),
            places: random.randint(0, length, (count, 3)),
            labels: random.randint(0, words, (count, 3)),
            weights: random.randint(0, 2, (count, 3)),
            follows: random.randint(0, 2, count),
        }

    return Case(masked + following, logits, batch)


def translator(width: int = 16, heads: int = 2, words: int = 40) -> Case:
    """Two encoder and two decoder layers with shared embeddings, padding masks and label smoothing."""
    source, target = tf.placeholder(tf.int32, [None, 7], "source"), tf.placeholder(tf.int32, [None, 6], "target")
    table = tf.get_variable("embeddings", [words, width], initializer=_INIT)

    def embed(ids: tf.Tensor) -> tf.Tensor:
        length = ids.shape.as_list()[1]
        angle = np.arange(length)[:, None] / 100.0 ** (np.arange(width)[None] / width)
        return tf.nn.embedding_lookup(table, ids) * width**0.5 + tf.constant(np.sin(angle), tf.float32)

    def padding(ids: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.equal(ids, 0), tf.float32)[:, tf.newaxis, tf.newaxis, :] * -1e9

    memory = tf.nn.dropout(embed(source), rate=RATE)
    for at in range(2):
        with tf.variable_scope(f"encoder_{at}"):
            memory = block(memory, None, padding(source), None, heads)
    shifted = tf.pad(target, [[0, 0], [1, 0]])[:, :-1]
    h = tf.nn.dropout(embed(shifted), rate=RATE)
    later = (1.0 - tf.linalg.band_part(tf.ones([6, 6]), -1, 0)) * -1e9
    for at in range(2):
        with tf.variable_scope(f"decoder_{at}"):
            h = block(h, memory, later, padding(source), heads)
    logits = tf.reshape(tf.matmul(tf.reshape(h, [-1, width]), table, transpose_b=True), [-1, 6, words])
    smooth = tf.one_hot(target, words, on_value=0.9, off_value=0.1 / (words - 1))
    each = tf.nn.softmax_cross_entropy_with_logits_v2(labels=smooth, logits=logits)
    weights = tf.cast(tf.not_equal(target, 0), tf.float32)
    loss = tf.reduce_sum(each * weights) / tf.reduce_sum(weights)

    def batch(count: int, seed: int) -> dict[tf.Tensor, object]:
        random = np.random.RandomState(seed)
        return {source: random.randint(0, words, (count, 7)), target: random.randint(0, words, (count, 6))}

    return Case(loss, logits, batch)
