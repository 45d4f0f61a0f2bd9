"""Normalization layers of tf.contrib.layers, which exports them."""

from __future__ import annotations

from typing import Any

from gemini.tensorflow.compat.contrib_framework import add_arg_scope
from gemini.tensorflow.compat.lazy_names import tf


def _variable(name: str, size: Any, dtype: Any, start: Any, trainable: bool) -> Any:
    keys = tf.GraphKeys
    return tf.get_variable(
        name,
        [size],
        dtype,
        initializer=start,
        trainable=trainable,
        collections=[keys.GLOBAL_VARIABLES, keys.MODEL_VARIABLES],
    )


def _finish(outputs: Any, activation_fn: Any, collections: Any) -> Any:
    outputs = outputs if activation_fn is None else activation_fn(outputs)
    for collection in [collections] if isinstance(collections, str) else collections or ():
        tf.add_to_collection(collection, outputs)
    return outputs


@add_arg_scope
def layer_norm(
    inputs: Any,
    center: bool = True,
    scale: bool = True,
    activation_fn: Any = None,
    reuse: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    scope: Any = None,
) -> Any:
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
        make = {"dtype": dtype, "trainable": trainable}
        keys = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
        beta = gamma = None
        if center:
            beta = tf.get_variable("beta", shape, initializer=tf.zeros_initializer(), collections=keys, **make)
        if scale:
            gamma = tf.get_variable("gamma", shape, initializer=tf.ones_initializer(), collections=keys, **make)
        mean, variance = tf.nn.moments(inputs, list(range(first, rank)), keep_dims=True)
        epsilon = 1e-3 if dtype == tf.float16 else 1e-12
        outputs = tf.nn.batch_normalization(inputs, mean, variance, offset=beta, scale=gamma, variance_epsilon=epsilon)
        outputs.set_shape(inputs.shape)
        return _finish(outputs, activation_fn, outputs_collections)


@add_arg_scope
def batch_norm(
    inputs: Any,
    decay: float = 0.999,
    center: bool = True,
    scale: bool = False,
    epsilon: float = 0.001,
    activation_fn: Any = None,
    updates_collections: Any = "update_ops",
    is_training: Any = True,
    reuse: Any = None,
    outputs_collections: Any = None,
    trainable: bool = True,
    fused: bool | None = None,
    data_format: str = "NHWC",
    scope: Any = None,
) -> Any:
    """Return `inputs` normalized over the batch; `None` as collection updates the averages with the output."""
    if data_format != "NHWC":
        raise ValueError(f"batch_norm: data_format={data_format!r} is not in the compatibility layer; write NHWC")
    with tf.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        rank, dtype, size = inputs.shape.ndims, inputs.dtype.base_dtype, inputs.shape[-1]
        zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
        beta = _variable("beta", size, dtype, zeros, trainable) if center else None
        gamma = _variable("gamma", size, dtype, ones, trainable) if scale else None
        averages = [_variable("moving_mean", size, dtype, zeros, False)]
        averages.append(_variable("moving_variance", size, dtype, ones, False))
        axes = list(range(rank - 1))
        is_fused = rank == 4 if fused is None else fused

        def of_batch() -> Any:
            mean, variance = tf.nn.moments(inputs, axes)
            return [mean, variance, *_updated(averages, mean, variance, decay, _count(inputs, axes, is_fused))]

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
        return _finish(outputs, activation_fn, outputs_collections)


def _count(inputs: Any, axes: list[int], is_fused: bool) -> Any:
    """Return the samples of a mean where the variance kept is that of a sample, as in the fused op; else None."""
    return tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype) if is_fused else None


def _updated(averages: list[Any], mean: Any, variance: Any, decay: float, count: Any) -> list[Any]:
    if count is not None:
        variance = variance * (count / tf.maximum(count - 1, 1))
    return [old - (old - new) * (1 - decay) for old, new in zip(averages, (mean, variance))]
