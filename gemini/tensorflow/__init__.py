"""TensorFlow: training steps of TensorFlow graphs in parallel, with the numbers of one device.

The graph of the script is never changed. Its calls of `tf.gradients` are noted, and the session of the script runs a
*twin* of the graph: the forward part copied per micro-batch, stage and shard, differentiated by TensorFlow itself, with
the rest of the training graph (clipping, optimizers, savers) attached to the new gradients. Start with `entry.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.tensorflow.entry import compile_function, install, is_installed, reports, split_gradients, uninstall
    from gemini.tensorflow.twin_report import TwinReport

__all__ = [
    "TwinReport",
    "compile_function",
    "install",
    "is_installed",
    "reports",
    "split_gradients",
    "uninstall",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use; none of them loads TensorFlow before it is called."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "twin_report" if name == "TwinReport" else "entry"
    value = getattr(import_module(f"gemini.tensorflow.{module}"), name)
    globals()[name] = value
    return value
