"""tf.contrib.layers: layers as functions, their initializers and regularizers, and `optimize_loss`.

Scopes and variables have the names of TensorFlow 1 (`fully_connected/weights`, `Conv/biases`, `BatchNorm/moving_mean`),
so that its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gemini.tensorflow.compat.contrib_framework import add_arg_scope
from gemini.tensorflow.compat.lazy_names import lazy_names, tf

__getattr__ = lazy_names(
    "tf.contrib.layers",
    {
        "batch_norm": "gemini.tensorflow.compat.contrib_normalization:batch_norm",
        "layer_norm": "gemini.tensorflow.compat.contrib_normalization:layer_norm",
        "optimize_loss": "gemini.tensorflow.compat.contrib_optimize_loss:optimize_loss",
    },
)

_RELU: Any = "relu"  # the default activation; None is a linear layer
_Function = Callable[..., Any]


def _activated(outputs: Any, activation_fn: Any, collections: Any) -> Any:
    if activation_fn is not None:
        outputs = tf.nn.relu(outputs) if activation_fn == _RELU else activation_fn(outputs)
    for collection in [collections] if isinstance(collections, str) else collections or ():
        tf.add_to_collection(collection, outputs)
    return outputs


def _weights(
    name: str, shape: Sequence[Any], dtype: Any, initializer: Any, regularizer: Any, collections: Any, trainable: bool
) -> Any:
    kept = list(collections or ())
    standard = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
    return tf.get_variable(
        name,
        shape,
        dtype,
        initializer=initializer,
        regularizer=regularizer,
        trainable=trainable,
        collections=[*standard, *kept],
    )


def _of(collections: Any, name: str) -> Any:
    return collections.get(name) if isinstance(collections, dict) else collections


@add_arg_scope
def fully_connected(
    inputs: Any,
    num_outputs: int,
    activation_fn: Any = _RELU,
    normalizer_fn: _Function | None = None,
    normalizer_params: dict[str, Any] | None = None,
    weights_initializer: Any = None,
    weights_regularizer: Any = None,
    biases_initializer: Any = "zeros",
    biases_regularizer: Any = None,
    reuse: Any = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    scope: Any = None,
) -> Any:
    """Return a dense layer of `inputs`; without biases where a normalizer follows."""
    with tf.variable_scope(scope, "fully_connected", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        width, dtype = inputs.shape[-1], inputs.dtype.base_dtype
        weights = _weights(
            "weights", [width, num_outputs], dtype, weights_initializer or xavier_initializer(), weights_regularizer,
            _of(variables_collections, "weights"), trainable,
        )  # fmt: skip
        if inputs.shape.ndims is not None and inputs.shape.ndims > 2:
            outputs = tf.tensordot(inputs, weights, [[inputs.shape.ndims - 1], [0]])
            outputs.set_shape([*inputs.shape[:-1], num_outputs])
        else:
            outputs = tf.matmul(inputs, weights)
        outputs = _biased(
            outputs, normalizer_fn, normalizer_params, biases_initializer, biases_regularizer,
            _of(variables_collections, "biases"), trainable,
        )  # fmt: skip
        return _activated(outputs, activation_fn, outputs_collections)


def _biased(
    outputs: Any,
    normalizer_fn: _Function | None,
    normalizer_params: dict[str, Any] | None,
    initializer: Any,
    regularizer: Any,
    collections: Any,
    trainable: bool,
    data_format: str = "NHWC",
) -> Any:
    if normalizer_fn is not None:
        return normalizer_fn(outputs, **(normalizer_params or {}))
    if initializer is None:
        return outputs
    start = tf.zeros_initializer() if initializer == "zeros" else initializer
    width = outputs.shape[1 if data_format == "NCHW" else -1]
    biases = _weights("biases", [width], outputs.dtype.base_dtype, start, regularizer, collections, trainable)
    return tf.nn.bias_add(outputs, biases, data_format=data_format) if outputs.shape.ndims != 2 else outputs + biases


def _pair(value: Any) -> list[Any]:
    return [value, value] if isinstance(value, int) else list(value)


@add_arg_scope
def conv2d(
    inputs: Any,
    num_outputs: int,
    kernel_size: Any,
    stride: Any = 1,
    padding: str = "SAME",
    data_format: str | None = None,
    rate: Any = 1,
    activation_fn: Any = _RELU,
    normalizer_fn: _Function | None = None,
    normalizer_params: dict[str, Any] | None = None,
    weights_initializer: Any = None,
    weights_regularizer: Any = None,
    biases_initializer: Any = "zeros",
    biases_regularizer: Any = None,
    reuse: Any = None,
    variables_collections: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    scope: Any = None,
) -> Any:
    """Return a two-dimensional convolution of `inputs`; without biases where a normalizer follows."""
    layout = data_format or "NHWC"
    with tf.variable_scope(scope, "Conv", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        width = inputs.shape[1 if layout == "NCHW" else -1]
        weights = _weights(
            "weights", [*_pair(kernel_size), width, num_outputs], inputs.dtype.base_dtype,
            weights_initializer or xavier_initializer(), weights_regularizer,
            _of(variables_collections, "weights"), trainable,
        )  # fmt: skip
        outputs = tf.nn.convolution(
            inputs, weights, padding, strides=_pair(stride), dilation_rate=_pair(rate), data_format=layout
        )
        outputs = _biased(
            outputs, normalizer_fn, normalizer_params, biases_initializer, biases_regularizer,
            _of(variables_collections, "biases"), trainable, layout,
        )  # fmt: skip
        return _activated(outputs, activation_fn, outputs_collections)


def _pool(function: str, title: str) -> _Function:
    @add_arg_scope
    def pooled(
        inputs: Any,
        kernel_size: Any,
        stride: Any = 2,
        padding: str = "VALID",
        data_format: str = "NHWC",
        outputs_collections: Any = None,
        scope: Any = None,
    ) -> Any:
        with tf.name_scope(scope, title, [inputs]):
            window, steps = _pair(kernel_size), _pair(stride)
            last = data_format == "NHWC"
            outputs = getattr(tf.nn, function)(
                inputs,
                ksize=[1, *window, 1] if last else [1, 1, *window],
                strides=[1, *steps, 1] if last else [1, 1, *steps],
                padding=padding,
                data_format=data_format,
            )
            return _activated(outputs, None, outputs_collections)

    pooled.__name__ = f"{function}2d"
    return pooled


max_pool2d = _pool("max_pool", "MaxPool2D")
avg_pool2d = _pool("avg_pool", "AvgPool2D")
convolution2d = conv2d
linear = partial(fully_connected, activation_fn=None)
relu = fully_connected


@add_arg_scope
def dropout(
    inputs: Any,
    keep_prob: Any = 0.5,
    noise_shape: Any = None,
    is_training: Any = True,
    outputs_collections: Any = None,
    scope: Any = None,
    seed: int | None = None,
) -> Any:
    """Return `inputs` with dropout; unchanged where `is_training` is false."""
    with tf.name_scope(scope, "Dropout", [inputs]):
        inputs = tf.convert_to_tensor(inputs)

        def dropped() -> Any:
            return tf.nn.dropout(inputs, noise_shape=noise_shape, seed=seed, rate=1 - keep_prob)

        if isinstance(is_training, bool):
            outputs = dropped() if is_training else tf.identity(inputs)
        else:
            outputs = tf.cond(tf.cast(is_training, tf.bool), dropped, lambda: tf.identity(inputs))
        return _activated(outputs, None, outputs_collections)


@add_arg_scope
def flatten(inputs: Any, outputs_collections: Any = None, scope: Any = None) -> Any:
    """Return `inputs` with all dimensions but the first as one."""
    with tf.name_scope(scope, "Flatten", [inputs]):
        inputs = tf.convert_to_tensor(inputs)
        rest = inputs.shape[1:]
        known = rest.num_elements() if rest.is_fully_defined() else None
        if known is not None:
            outputs = tf.reshape(inputs, [-1, known])
        else:
            outputs = tf.reshape(inputs, [tf.shape(inputs)[0], -1])
        return _activated(outputs, None, outputs_collections)


def one_hot_encoding(labels: Any, num_classes: int, on_value: Any = 1.0, off_value: Any = 0.0) -> Any:
    """Return `labels` as one-hot vectors."""
    return tf.one_hot(tf.cast(labels, tf.int64), num_classes, on_value=on_value, off_value=off_value)


def embed_sequence(
    ids: Any,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    unique: bool = False,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    scope: Any = None,
    reuse: Any = None,
) -> Any:
    """Return the embeddings of `ids`, whose table is a new variable."""
    if vocab_size is None or embed_dim is None:
        raise ValueError("Must specify vocabulary size and embedding dimension when not reusing. Got vocab_size=None")
    with tf.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        table = tf.get_variable(
            "embeddings", [vocab_size, embed_dim], initializer=initializer, regularizer=regularizer, trainable=trainable
        )
        if not unique:
            return tf.nn.embedding_lookup(table, ids)
        found, places = tf.unique(tf.reshape(ids, [-1]))
        flat = tf.gather(tf.nn.embedding_lookup(table, found), places)
        return tf.reshape(flat, tf.concat([tf.shape(ids), [embed_dim]], 0))


def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype: Any = None) -> Any:
    """Return the initializer of Glorot and Bengio."""
    make = tf.glorot_uniform_initializer if uniform else tf.glorot_normal_initializer
    return make(seed=seed) if dtype is None else make(seed=seed, dtype=dtype)


xavier_initializer_conv2d = xavier_initializer


def variance_scaling_initializer(
    factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: int | None = None, dtype: Any = None
) -> Any:
    """Return an initializer whose variance is `factor` over the fan that `mode` names."""
    return tf.variance_scaling_initializer(
        scale=factor,
        mode=mode.lower(),
        distribution="uniform" if uniform else "truncated_normal",
        seed=seed,
        **({} if dtype is None else {"dtype": dtype}),
    )


def l1_regularizer(scale: float, scope: Any = None) -> _Function:
    """Return `scale` times the sum of absolute values, as a function of weights."""

    def l1(weights: Any, name: str | None = None) -> Any:
        with tf.name_scope(scope, "l1_regularizer", [weights]):
            return tf.multiply(tf.cast(scale, weights.dtype.base_dtype), tf.reduce_sum(tf.abs(weights)), name=name)

    return l1


def l2_regularizer(scale: float, scope: Any = None) -> _Function:
    """Return `scale` times half the sum of squares, as a function of weights."""

    def l2(weights: Any, name: str | None = None) -> Any:
        with tf.name_scope(scope, "l2_regularizer", [weights]):
            return tf.multiply(tf.cast(scale, weights.dtype.base_dtype), tf.nn.l2_loss(weights), name=name)

    return l2


def l1_l2_regularizer(scale_l1: float = 1.0, scale_l2: float = 1.0, scope: Any = None) -> _Function:
    """Return the sum of both."""
    return sum_regularizer([l1_regularizer(scale_l1), l2_regularizer(scale_l2)], scope)


def sum_regularizer(regularizer_list: Sequence[_Function | None], scope: Any = None) -> _Function:
    """Return the sum of regularizers, as a function of weights."""

    def total(weights: Any) -> Any:
        with tf.name_scope(scope, "sum_regularizer", [weights]):
            return tf.add_n([one(weights) for one in regularizer_list if one is not None])

    return total


def apply_regularization(regularizer: _Function, weights_list: Sequence[Any] | None = None) -> Any:
    """Return the sum of penalties of all weights, and add them to the graph's losses."""
    chosen = tf.get_collection(tf.GraphKeys.WEIGHTS) if weights_list is None else weights_list
    penalties = [regularizer(one) for one in chosen]
    for one in penalties:
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, one)
    return tf.add_n(penalties) if penalties else tf.constant(0.0)
