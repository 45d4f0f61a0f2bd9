"""Traced functions: the engine in programs of TensorFlow 2, whose steps are functions instead of sessions.

eager_cluster.py   the eager runtime joins the servers
tapes.py           the gradients of a tape, while tracing, are those of a twin
keras_trainer.py   `fit` traces its step per batch size
"""

from __future__ import annotations

from gemini.tensorflow.eager_cluster import join_on_first_use, leave
from gemini.tensorflow.keras_trainer import patch_trainer, restore_trainer
from gemini.tensorflow.servers import servers_for
from gemini.tensorflow.tapes import TapeEngine, patch_tapes, restore_tapes


def install_functions(engine: TapeEngine) -> None:
    """Let functions of TensorFlow train as the configuration of the engine says."""
    join_on_first_use(servers_for(engine.config))
    patch_tapes(engine)
    patch_trainer()


def uninstall_functions() -> None:
    """Undo `install_functions`."""
    restore_trainer()
    restore_tapes()
    leave()
