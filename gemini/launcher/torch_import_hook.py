"""Arming: a program's process waits until torch is imported, and then for optimizers.

Loaded in the user's process before anything of the user's: it imports nothing that Python has not loaded already.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gemini.launcher.model_discovery import Recognition
    from gemini.launcher.process.import_hook import Hook
    from gemini.launcher.process.launch_session import Session

_OPTIMIZERS = "torch.optim.optimizer"
_NOTHING = "no model was trained"
_LAYERS = "only single layers were trained, each called by itself"


class Armed:
    """A process in which models are looked for. Its children train as under `python`."""

    session: Session | None = None
    folder = ""  # where the program was started: files that its configuration names count from there
    owner = 0
    recognition: Recognition | None = None

    def found(self) -> Recognition:
        """What is known of the program's models."""
        if self.recognition is None:
            from gemini.launcher.model_discovery import recognition_for

            assert self.session is not None
            self.recognition = recognition_for(self.session, self.folder)
        return self.recognition


armed = Armed()


def arm(session: Session, hook: Hook) -> None:
    """See to it that the models which this process trains are found."""
    armed.session, armed.owner = session, os.getpid()
    try:
        armed.folder = os.getcwd()
    except OSError:  # removed
        armed.folder = ""
    hook.followers[_OPTIMIZERS] = __name__
    if _OPTIMIZERS in sys.modules:
        follow(_OPTIMIZERS)


def follow(name: str) -> None:
    """Torch's optimizers have just been imported: be told what they are given, and of losses without any."""
    import atexit

    from gemini.launcher.script_api import forward_calls, training_marks

    kind: Any = sys.modules[name].Optimizer
    add = kind.add_param_group

    def add_param_group(self: Any, param_group: Any) -> None:
        add(self, param_group)
        _given(self)

    add_param_group.__doc__ = add.__doc__
    kind.add_param_group = add_param_group

    def started() -> None:
        if armed.recognition is None:  # the script trains without an optimizer of torch's
            _tell(lambda found: found.take_all())

    training_marks.on_first_step(started)
    forward_calls.begin()
    atexit.register(_end_run)
    if armed.session is not None and not armed.session["flags"].get("strict"):
        from gemini.launcher import excepthook

        excepthook.install()


def _given(optimizer: Any) -> None:
    """An optimizer has parameters: from now on the modules that use them are looked for."""
    _tell(lambda found: found.given(optimizer))


def _tell(news: Callable[[Recognition], None]) -> None:
    """What fails of ours here is no matter of the program's: its models stay where they are, and one line says so."""
    if os.getpid() != armed.owner or armed.session is None:
        return
    try:
        news(armed.found())
    except Exception as fault:
        if armed.session["flags"].get("strict"):
            raise
        if not armed.session["quiet"]:
            sys.stderr.write(f"gemini: models are not looked for: {type(fault).__name__}: {fault}\n")
        armed.session = None


def _end_run() -> None:
    """Record the run; print one line where a program that imported torch ends without an error and trained nothing."""
    if os.getpid() != armed.owner or armed.session is None:
        return
    _record_run(armed.session)
    if armed.session["quiet"] or hasattr(sys, "last_value"):
        return
    found = armed.recognition
    if found is None or not found.models:
        from contextlib import suppress

        what = _NOTHING if found is None or not found.layers else _LAYERS
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed
            sys.stderr.write(f"gemini: {what}: the program ran as under python\n")


def _record_run(session: Session) -> None:
    """Let `gemini explain` report this run also where no model of it has a journal entry."""
    from contextlib import suppress

    with suppress(Exception):  # a faulty configuration has been reported already
        from pathlib import Path

        from gemini.launcher.policy import load_config
        from gemini.runtime.run_journal import record_idle_run

        record_idle_run(Path(load_config(session, armed.folder).run_folder).resolve())
