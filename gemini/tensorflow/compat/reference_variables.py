"""Reference variables: what the variables of TensorFlow 1 can do in graphs, and resources cannot.

ema.average(v) or v          a variable is true
v.initialized_value()        the value, or, before the initializer ran, what it will be
"""

from __future__ import annotations

from typing import Any


def is_true(variable: Any) -> bool:
    """Return True, as any object is; outside of graphs, whether the value is true."""
    import tensorflow as tf

    return bool(variable.read_value()) if tf.executing_eagerly() else True


def initialized_value(variable: Any) -> Any:
    """Return a tensor with the value of a variable, or with its initial value where it has none yet."""
    import tensorflow.compat.v1 as tf

    with tf.init_scope():
        return tf.cond(variable.is_initialized(), variable.read_value, lambda: variable.initial_value)


METHODS = {"__bool__": is_true, "initialized_value": initialized_value}
