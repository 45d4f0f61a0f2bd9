"""tf.contrib.rnn: recurrent cells and loops, which are `tf.nn` and Keras 2 today."""

from __future__ import annotations

from gemini.tensorflow.compat.lazy_names import LEGACY, lazy_names

_CELLS = (
    "BasicLSTMCell", "BasicRNNCell", "DeviceWrapper", "DropoutWrapper", "GRUCell", "LSTMCell", "LSTMStateTuple",
    "MultiRNNCell", "RNNCell", "ResidualWrapper",
)  # fmt: skip
_LOOPS = ("static_bidirectional_rnn", "static_rnn", "static_state_saving_rnn")

__getattr__ = lazy_names(
    "tf.contrib.rnn",
    {
        **{name: f"{LEGACY}.__internal__.legacy.rnn_cell:{name}" for name in _CELLS},
        **{name: f"tensorflow.compat.v1:nn.{name}" for name in _LOOPS},
    },
)
