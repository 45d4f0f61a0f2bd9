"""Graph model: what the compiler accepts from TensorFlow, a function that builds a graph or a Keras model.

    model = GeminiCompiler().compiler(model, config)      model(features, labels) → (logits, loss)
    logits, loss = model(features, labels)
    train = tf.compat.v1.train.AdamOptimizer().minimize(loss)
    with tf.compat.v1.Session() as session: …             steps run as `config` says

A session connects to its devices when it is made: one that exists already is refused.
"""

from __future__ import annotations

import sys
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault
from gemini.tensorflow.graph_devices import graph_devices
from gemini.tensorflow.servers import open_sessions

_SOURCE = "GeminiCompiler.compiler"


def builds_graph(model: Any) -> bool:
    """Whether a model is TensorFlow's: a function, or a Keras model, in a program that has imported TensorFlow."""
    kinds = type(model).__mro__
    is_torch = any(kind.__module__.partition(".")[0] == "torch" for kind in kinds)
    return "tensorflow" in sys.modules and callable(model) and not is_torch


def compile_graph_model(model: Any, config: GeminiConfig) -> Any:
    """Return the model; training graphs built on its results run as `config` says."""
    from gemini.tensorflow.entry import compile_function, install

    graph_devices(config)  # raises for unknown devices
    _refuse_earlier_sessions()
    if hasattr(model, "trainable_variables"):  # of Keras: its methods trace the steps
        install(config)
        return model
    return compile_function(model, config)


def _refuse_earlier_sessions() -> None:
    """Raise for an open session of the default graph."""
    import tensorflow.compat.v1 as tf

    graph = tf.get_default_graph()
    if any(one.graph is graph for one in open_sessions()):
        fault = Fault("a session of this graph exists already", "call the compiler before tf.Session()")
        raise ConfigError([fault], _SOURCE)
