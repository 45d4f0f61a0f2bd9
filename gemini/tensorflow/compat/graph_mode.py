"""Graph mode: what `import tensorflow as tf` does in a script of TensorFlow 1.

    from gemini.tensorflow.compat.graph_mode import tf1 as tf

The first name that is imported from here switches this process from eager execution to graphs and sessions. Two
settings differ from those of TensorFlow 1, whose graphs may race: variables are resources, and loops are functions.
Variables can what those of TensorFlow 1 can: `average or variable` takes any variable as true, and
`initialized_value()` is the value, or, before the initializer ran, what it will be.
"""

from __future__ import annotations

from typing import Any

_switched: list[bool] = []


def use_graphs() -> None:
    """Switch this process to graphs and sessions, once: a script may change the settings afterwards."""
    if not _switched:
        import tensorflow.compat.v1 as tf
        from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable
        from tensorflow.python.util import deprecation

        with deprecation.silence():  # of what is switched on again below
            tf.disable_v2_behavior()
        tf.enable_resource_variables()
        tf.enable_control_flow_v2()
        for name, method in REFERENCE_METHODS.items():
            setattr(BaseResourceVariable, name, method)
        _switched.append(True)


def _is_true(variable: Any) -> bool:
    """Return True, as any object is; outside of graphs, whether the value is true."""
    import tensorflow as tf

    return bool(variable.read_value()) if tf.executing_eagerly() else True


def _initialized_value(variable: Any) -> Any:
    """Return a tensor with the value of a variable, or with its initial value where it has none yet."""
    import tensorflow.compat.v1 as tf

    with tf.init_scope():
        return tf.cond(variable.is_initialized(), variable.read_value, lambda: variable.initial_value)


REFERENCE_METHODS = {"__bool__": _is_true, "initialized_value": _initialized_value}


def __getattr__(name: str) -> Any:
    """Switch, and return a name of TensorFlow 1, or `tf1` for all of them."""
    if name.startswith("__"):
        raise AttributeError(name)
    use_graphs()
    from gemini.tensorflow.compat import tf1

    return tf1 if name == "tf1" else getattr(tf1, name)
