"""TensorFlow import hook: installs the TensorFlow engine when the program imports TensorFlow.

Where the configuration requests no workers, nothing is installed: the program runs as under `python`.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.launcher.process.import_hook import ImportHook
    from gemini.launcher.process.launch_session import Session

_TENSORFLOW = "tensorflow"
_KERAS_TRAINER = "keras.src.backend.tensorflow.trainer"


class EngineState:
    """The session of this process. Child processes train as under `python`."""

    session: Session | None = None
    folder = ""  # the working directory at start: paths in the configuration are relative to it
    owner = 0


state = EngineState()


def install_hook(session: Session, hook: ImportHook) -> None:
    """Install the engine in this process once it imports TensorFlow."""
    state.session, state.owner = session, os.getpid()
    try:
        state.folder = os.getcwd()
    except OSError:  # removed
        state.folder = ""
    hook.followers[_TENSORFLOW] = __name__
    hook.followers[_KERAS_TRAINER] = __name__


def follow(name: str) -> None:
    """Install the engine in TensorFlow or Keras, which has just been imported, and start its servers."""
    if state.session is None or os.getpid() != state.owner:
        return
    if name == _KERAS_TRAINER:
        from gemini.tensorflow.entry import is_installed
        from gemini.tensorflow.keras_trainer import patch_trainer

        if is_installed():
            patch_trainer()
        return
    from gemini.launcher.defaults import count_cores, fill_defaults, load_config

    config = load_config(state.session, state.folder)
    if not (config.asks_for_workers or config.dry_run):
        return
    from gemini.tensorflow.entry import install

    install(fill_defaults(config, count_cores))
