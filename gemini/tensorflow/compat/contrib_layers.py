"""tf.contrib.layers: layers as functions, their initializers and regularizers, and `optimize_loss`.

Scopes and variables have the names of TensorFlow 1 (`fully_connected/weights`, `Conv/biases`, `BatchNorm/moving_mean`),
so that its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemini.tensorflow.compat.contrib_functions import add_arg_scope
from gemini.tensorflow.compat.lazy_names import tf

_RELU: Any = "relu"  # the default activation; None is a linear layer
_Function = Callable[..., Any]


def _activate(outputs: Any, activation_fn: Any, collections: Any) -> Any:
    if activation_fn is not None:
        outputs = tf.nn.relu(outputs) if activation_fn == _RELU else activation_fn(outputs)
    for collection in [collections] if isinstance(collections, str) else collections or ():
        tf.add_to_collection(collection, outputs)
    return outputs


def _variable(name: str, shape: Any, dtype: Any, initializer: Any, collections: Any = (), **more: Any) -> Any:
    named = collections.get(name) if isinstance(collections, dict) else collections
    every = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES, *(named or ())]
    return tf.get_variable(name, shape, dtype, initializer=initializer, collections=every, **more)


# ── layers with weights ────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class WeightOptions:
    """The arguments that all layers with weights take."""

    normalizer_fn: _Function | None = None
    normalizer_params: dict[str, Any] | None = None
    weights_initializer: Any = None
    weights_regularizer: Any = None
    biases_initializer: Any = "zeros"
    biases_regularizer: Any = None
    reuse: Any = None
    variables_collections: Any = None
    outputs_collections: Any = None
    trainable: bool = True
    scope: Any = None

    def build(self, title: str, inputs: Any, activation_fn: Any, layer: _Function) -> Any:
        """Return a layer under its scope; `layer(inputs, weights_of)` applies the weights of a shape."""
        with tf.variable_scope(self.scope, title, [inputs], reuse=self.reuse):
            inputs = tf.convert_to_tensor(inputs)
            start = self.weights_initializer or xavier_initializer()
            outputs, channel = layer(inputs, partial(self._weights, "weights", inputs, start, self.weights_regularizer))
            if self.normalizer_fn is not None:
                outputs = self.normalizer_fn(outputs, **(self.normalizer_params or {}))
            elif self.biases_initializer is not None:
                start = tf.zeros_initializer() if self.biases_initializer == "zeros" else self.biases_initializer
                biases = self._weights("biases", inputs, start, self.biases_regularizer, [outputs.shape[channel]])
                outputs = tf.nn.bias_add(outputs, biases, data_format="NC" if channel == 1 else None)
            return _activate(outputs, activation_fn, self.outputs_collections)

    def _weights(self, name: str, inputs: Any, start: Any, regularizer: Any, shape: Sequence[Any]) -> Any:
        return _variable(
            name, shape, inputs.dtype.base_dtype, start, self.variables_collections, regularizer=regularizer,
            trainable=self.trainable,
        )  # fmt: skip


@add_arg_scope
def fully_connected(inputs: Any, num_outputs: int, activation_fn: Any = _RELU, *more: Any, **options: Any) -> Any:
    """Return a dense layer of `inputs`; without biases where a normalizer follows."""

    def layer(inputs: Any, weights_of: _Function) -> tuple[Any, int]:
        weights, rank = weights_of([inputs.shape[-1], num_outputs]), inputs.shape.ndims
        if rank is None or rank <= 2:
            return tf.matmul(inputs, weights), -1
        outputs = tf.tensordot(inputs, weights, [[rank - 1], [0]])
        outputs.set_shape([*inputs.shape[:-1], num_outputs])
        return outputs, -1

    return WeightOptions(*more, **options).build("fully_connected", inputs, activation_fn, layer)


def _pair(value: Any) -> list[Any]:
    return [value, value] if isinstance(value, int) else list(value)


@add_arg_scope
def conv2d(
    inputs: Any, num_outputs: int, kernel_size: Any, stride: Any = 1, padding: str = "SAME",
    data_format: str | None = None, rate: Any = 1, activation_fn: Any = _RELU, *more: Any, **options: Any,
) -> Any:  # fmt: skip
    """Return a two-dimensional convolution of `inputs`; without biases where a normalizer follows."""
    channel = 1 if data_format == "NCHW" else -1

    def layer(inputs: Any, weights_of: _Function) -> tuple[Any, int]:
        weights = weights_of([*_pair(kernel_size), inputs.shape[channel], num_outputs])
        outputs = tf.nn.convolution(
            inputs, weights, padding, strides=_pair(stride), dilation_rate=_pair(rate), data_format=data_format
        )
        return outputs, channel

    return WeightOptions(*more, **options).build("Conv", inputs, activation_fn, layer)


convolution2d = conv2d
linear = partial(fully_connected, activation_fn=None)
relu = fully_connected


def embed_sequence(
    ids: Any, vocab_size: int | None = None, embed_dim: int | None = None, unique: bool = False,
    initializer: Any = None, regularizer: Any = None, trainable: bool = True, scope: Any = None, reuse: Any = None,
) -> Any:  # fmt: skip
    """Return the embeddings of `ids`, whose table is a new variable."""
    if vocab_size is None or embed_dim is None:
        raise ValueError("Must specify vocabulary size and embedding dimension when not reusing. Got vocab_size=None")
    with tf.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        shape = [vocab_size, embed_dim]
        table = tf.get_variable(
            "embeddings", shape, initializer=initializer, regularizer=regularizer, trainable=trainable
        )
        if not unique:
            return tf.nn.embedding_lookup(table, ids)
        found, places = tf.unique(tf.reshape(ids, [-1]))
        flat = tf.gather(tf.nn.embedding_lookup(table, found), places)
        return tf.reshape(flat, tf.concat([tf.shape(ids), [embed_dim]], 0))


# ── normalization ──────────────────────────────────────────────────────────────────────────────────────────────────
@add_arg_scope
def layer_norm(
    inputs: Any, center: bool = True, scale: bool = True, activation_fn: Any = None, reuse: Any = None,
    outputs_collections: Any = None, trainable: bool = True, begin_norm_axis: int = 1, begin_params_axis: int = -1,
    scope: Any = None,
) -> Any:  # fmt: skip
    """Return `inputs` normalized over the dimensions from `begin_norm_axis` on."""
    with tf.variable_scope(scope, "LayerNorm", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        rank, dtype = inputs.shape.ndims, inputs.dtype.base_dtype
        if rank is None:
            raise ValueError(f"Inputs {inputs.name} has undefined rank.")
        first, params = begin_norm_axis % rank, begin_params_axis % rank
        shape = inputs.shape[params:]
        if not shape.is_fully_defined():
            raise ValueError(f"Inputs {inputs.name}: shape(inputs)[{params}:] is not fully defined: {inputs.shape}")
        beta, gamma = _offset_and_scale(shape, dtype, center, scale, trainable)
        mean, variance = tf.nn.moments(inputs, list(range(first, rank)), keep_dims=True)
        epsilon = 1e-3 if dtype == tf.float16 else 1e-12
        outputs = tf.nn.batch_normalization(inputs, mean, variance, offset=beta, scale=gamma, variance_epsilon=epsilon)
        outputs.set_shape(inputs.shape)
        return _activate(outputs, activation_fn, outputs_collections)


def _offset_and_scale(shape: Any, dtype: Any, center: bool, scale: bool, trainable: bool) -> tuple[Any, Any]:
    beta = _variable("beta", shape, dtype, tf.zeros_initializer(), trainable=trainable) if center else None
    gamma = _variable("gamma", shape, dtype, tf.ones_initializer(), trainable=trainable) if scale else None
    return beta, gamma


@add_arg_scope
def batch_norm(
    inputs: Any, decay: float = 0.999, center: bool = True, scale: bool = False, epsilon: float = 0.001,
    activation_fn: Any = None, *, updates_collections: Any = "update_ops", is_training: Any = True, reuse: Any = None,
    outputs_collections: Any = None, trainable: bool = True, fused: bool | None = None, data_format: str = "NHWC",
    scope: Any = None,
) -> Any:  # fmt: skip
    """Return `inputs` normalized over the batch; `None` as collection updates the averages with the output."""
    if data_format != "NHWC":
        raise ValueError(f"batch_norm: data_format={data_format!r} is not in the compatibility layer; write NHWC")
    with tf.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        rank, dtype, shape = inputs.shape.ndims, inputs.dtype.base_dtype, [inputs.shape[-1]]
        beta, gamma = _offset_and_scale(shape, dtype, center, scale, trainable)
        averages = [
            _variable(f"moving_{name}", shape, dtype, start(), trainable=False)
            for name, start in (("mean", tf.zeros_initializer), ("variance", tf.ones_initializer))
        ]
        axes = list(range(rank - 1))

        def of_batch() -> Any:
            mean, variance = kept = tf.nn.moments(inputs, axes)
            if rank == 4 if fused is None else fused:  # the fused op keeps the variance of a sample
                count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), dtype)
                kept = mean, variance * (count / tf.maximum(count - 1, 1))
            return [mean, variance, *(old - (old - new) * (1 - decay) for old, new in zip(averages, kept))]

        def of_averages() -> Any:
            held = [tf.identity(one) for one in averages]
            return [*held, *held]

        if isinstance(is_training, bool):
            mean, variance, *news = of_batch() if is_training else of_averages()
        else:
            mean, variance, *news = tf.cond(tf.cast(is_training, tf.bool), of_batch, of_averages)
        updates = [] if is_training is False else [tf.assign(old, new) for old, new in zip(averages, news)]
        if updates_collections is None:
            with tf.control_dependencies(updates):
                mean = tf.identity(mean)
        else:
            for one in updates:
                tf.add_to_collections(updates_collections, one)
        outputs = tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, epsilon)
        outputs.set_shape(inputs.shape)
        return _activate(outputs, activation_fn, outputs_collections)


# ── layers without weights ─────────────────────────────────────────────────────────────────────────────────────────
def _pool(function: str, title: str) -> _Function:
    @add_arg_scope
    def pooled(
        inputs: Any, kernel_size: Any, stride: Any = 2, padding: str = "VALID", data_format: str = "NHWC",
        outputs_collections: Any = None, scope: Any = None,
    ) -> Any:  # fmt: skip
        with tf.name_scope(scope, title, [inputs]):
            window, steps = _pair(kernel_size), _pair(stride)
            last = data_format == "NHWC"
            ksize, strides = ([1, *one, 1] if last else [1, 1, *one] for one in (window, steps))
            outputs = getattr(tf.nn, function)(inputs, ksize, strides, padding, data_format)
            return _activate(outputs, None, outputs_collections)

    pooled.__name__ = f"{function}2d"
    return pooled


max_pool2d = _pool("max_pool", "MaxPool2D")
avg_pool2d = _pool("avg_pool", "AvgPool2D")


@add_arg_scope
def dropout(
    inputs: Any, keep_prob: Any = 0.5, noise_shape: Any = None, is_training: Any = True,
    outputs_collections: Any = None, scope: Any = None, seed: int | None = None,
) -> Any:  # fmt: skip
    """Return `inputs` with dropout; unchanged where `is_training` is false."""
    with tf.name_scope(scope, "Dropout", [inputs]):
        inputs = tf.convert_to_tensor(inputs)

        def dropped() -> Any:
            return tf.nn.dropout(inputs, noise_shape=noise_shape, seed=seed, rate=1 - keep_prob)

        if isinstance(is_training, bool):
            outputs = dropped() if is_training else tf.identity(inputs)
        else:
            outputs = tf.cond(tf.cast(is_training, tf.bool), dropped, lambda: tf.identity(inputs))
        return _activate(outputs, None, outputs_collections)


@add_arg_scope
def flatten(inputs: Any, outputs_collections: Any = None, scope: Any = None) -> Any:
    """Return `inputs` with all dimensions but the first as one."""
    with tf.name_scope(scope, "Flatten", [inputs]):
        inputs = tf.convert_to_tensor(inputs)
        known = inputs.shape[1:].num_elements()
        shape = [tf.shape(inputs)[0], -1] if known is None else [-1, known]
        return _activate(tf.reshape(inputs, shape), None, outputs_collections)


def one_hot_encoding(labels: Any, num_classes: int, on_value: Any = 1.0, off_value: Any = 0.0) -> Any:
    """Return `labels` as one-hot vectors."""
    return tf.one_hot(tf.cast(labels, tf.int64), num_classes, on_value=on_value, off_value=off_value)


# ── initializers and regularizers ──────────────────────────────────────────────────────────────────────────────────
def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype: Any = None) -> Any:
    """Return the initializer of Glorot and Bengio."""
    make = tf.glorot_uniform_initializer if uniform else tf.glorot_normal_initializer
    return make(seed=seed) if dtype is None else make(seed=seed, dtype=dtype)


xavier_initializer_conv2d = xavier_initializer


def variance_scaling_initializer(
    factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: int | None = None, dtype: Any = None
) -> Any:
    """Return an initializer whose variance is `factor` over the fan that `mode` names."""
    distribution = "uniform" if uniform else "truncated_normal"
    more = {} if dtype is None else {"dtype": dtype}
    return tf.variance_scaling_initializer(factor, mode.lower(), distribution, seed=seed, **more)


def _regularizer(title: str, penalty: _Function, scope: Any) -> _Function:
    def regularize(weights: Any, name: str | None = None) -> Any:
        with tf.name_scope(scope, title, [weights]):
            return tf.identity(penalty(weights), name=name)

    return regularize


def l1_regularizer(scale: float, scope: Any = None) -> _Function:
    """Return `scale` times the sum of absolute values, as a function of weights."""
    return _regularizer("l1_regularizer", lambda weights: scale * tf.reduce_sum(tf.abs(weights)), scope)


def l2_regularizer(scale: float, scope: Any = None) -> _Function:
    """Return `scale` times half the sum of squares, as a function of weights."""
    return _regularizer("l2_regularizer", lambda weights: scale * tf.nn.l2_loss(weights), scope)


def l1_l2_regularizer(scale_l1: float = 1.0, scale_l2: float = 1.0, scope: Any = None) -> _Function:
    """Return the sum of both."""
    return sum_regularizer([l1_regularizer(scale_l1), l2_regularizer(scale_l2)], scope)


def sum_regularizer(regularizer_list: Sequence[_Function | None], scope: Any = None) -> _Function:
    """Return the sum of regularizers, as a function of weights."""
    given = [one for one in regularizer_list if one is not None]
    return _regularizer("sum_regularizer", lambda weights: tf.add_n([one(weights) for one in given]), scope)


def apply_regularization(regularizer: _Function, weights_list: Sequence[Any] | None = None) -> Any:
    """Return the sum of penalties of all weights, and add them to the graph's losses."""
    chosen = tf.get_collection(tf.GraphKeys.WEIGHTS) if weights_list is None else weights_list
    penalties = [regularizer(one) for one in chosen]
    for one in penalties:
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, one)
    return tf.add_n(penalties) if penalties else tf.constant(0.0)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────
_OPTIMIZERS = {"SGD": "GradientDescent", **{name: name for name in ("Adagrad", "Adam", "Ftrl", "RMSProp")}}


def optimize_loss(
    loss: Any, global_step: Any, learning_rate: Any, optimizer: Any, clip_gradients: Any = None,
    learning_rate_decay_fn: _Function | None = None, update_ops: Sequence[Any] | None = None,
    variables: Sequence[Any] | None = None, name: str | None = None, increment_global_step: bool = True,
) -> Any:  # fmt: skip
    """Return an operation that makes one step and returns the loss."""
    with tf.variable_scope(name, "OptimizeLoss", [loss, global_step]):
        counter = tf.train.get_or_create_global_step() if global_step is None else global_step
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS) if update_ops is None else update_ops
        with tf.control_dependencies(list(updates)):
            loss = tf.identity(loss)
        rate = learning_rate
        if rate is not None and learning_rate_decay_fn is not None:
            rate = learning_rate_decay_fn(rate, counter)
        made = _make_optimizer(optimizer, rate)
        pairs = made.compute_gradients(loss, tf.trainable_variables() if variables is None else list(variables))
        if callable(clip_gradients):
            pairs = list(clip_gradients(pairs))
        elif clip_gradients is not None:
            given, chosen = zip(*(pair for pair in pairs if pair[0] is not None))
            pairs = list(zip(tf.clip_by_global_norm(given, clip_gradients)[0], chosen))
        step = made.apply_gradients(pairs, global_step=counter if increment_global_step else None, name="train")
        with tf.control_dependencies([step]):
            return tf.identity(loss)


def _make_optimizer(given: Any, rate: Any) -> Any:
    if isinstance(given, str):
        if given not in _OPTIMIZERS:
            raise ValueError(f"Optimizer name should be one of [{', '.join(_OPTIMIZERS)}], you provided {given}.")
        return getattr(tf.train, f"{_OPTIMIZERS[given]}Optimizer")(learning_rate=rate)
    if isinstance(given, type):
        return given(learning_rate=rate)
    if callable(given):
        return given(rate) if rate is not None else given()
    return given
