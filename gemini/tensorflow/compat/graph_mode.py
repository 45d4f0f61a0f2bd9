"""Graph mode: what `import tensorflow as tf` does in a script of TensorFlow 1.

    from gemini.tensorflow.compat.graph_mode import tf1 as tf

The first name that is imported from here switches this process from eager execution to graphs and sessions. Two
settings differ from those of TensorFlow 1, whose graphs may race: variables are resources, and loops are functions.
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

        from gemini.tensorflow.compat.reference_variables import METHODS

        with deprecation.silence():  # of what is switched on again below
            tf.disable_v2_behavior()
        tf.enable_resource_variables()
        tf.enable_control_flow_v2()
        for name, method in METHODS.items():
            setattr(BaseResourceVariable, name, method)
        _switched.append(True)


def __getattr__(name: str) -> Any:
    """Switch, and return a name of TensorFlow 1, or `tf1` for all of them."""
    if name.startswith("__"):
        raise AttributeError(name)
    use_graphs()
    from gemini.tensorflow.compat import tf1

    return tf1 if name == "tf1" else getattr(tf1, name)
