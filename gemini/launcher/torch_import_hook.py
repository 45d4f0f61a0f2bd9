"""Torch import hook: starts model discovery when the program imports PyTorch's optimizers.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from typing import Any

    from gemini.launcher.model_discovery import ModelDiscovery
    from gemini.launcher.process.import_hook import ImportHook
    from gemini.launcher.process.launch_session import Session

_OPTIMIZERS = "torch.optim.optimizer"
_NOTHING = "no model was trained"
_LAYERS = "only single layers were trained, called directly"


class DiscoveryState:
    """The model discovery of this process. Child processes train as under `python`."""

    session: Session | None = None
    folder = ""  # the working directory at start: paths in the configuration are relative to it
    owner = 0
    discovery: ModelDiscovery | None = None
    waiting: list[tuple[weakref.ref[Any], str, str]]  # models and their places, before there is a discovery

    def __init__(self) -> None:
        self.waiting = []

    def model_discovery(self) -> ModelDiscovery:
        """Return the model discovery, created on first use."""
        if self.discovery is None:
            from gemini.launcher.model_discovery import start_discovery

            assert self.session is not None
            self.discovery = start_discovery(self.session, self.folder)
        return self.discovery


state = DiscoveryState()


def install_hook(session: Session, hook: ImportHook) -> None:
    """Start model discovery in this process once it imports torch."""
    state.session, state.owner = session, os.getpid()
    try:
        state.folder = os.getcwd()
    except OSError:  # removed
        state.folder = ""
    hook.followers[_OPTIMIZERS] = __name__
    if _OPTIMIZERS in sys.modules:
        follow(_OPTIMIZERS)


def follow(name: str) -> None:
    """Observe optimizers, which have just been imported, and losses of programs without one."""
    import atexit

    from gemini.launcher.script_api import construction_sites, forward_calls, training_marks

    kind: Any = sys.modules[name].Optimizer
    add = kind.add_param_group

    def add_param_group(self: Any, param_group: Any) -> None:
        add(self, param_group)
        _register_optimizer(self)

    add_param_group.__doc__ = add.__doc__
    kind.add_param_group = add_param_group

    def start() -> None:
        if state.discovery is None:  # the script trains without a PyTorch optimizer
            _apply_event(lambda found: found.register_all())

    construction_sites.on_construction(_register_object)
    training_marks.on_first_step(start)
    forward_calls.enable_module_calls()
    atexit.register(_end_run)
    if state.session is not None and not state.session["flags"].get("strict"):
        from gemini.launcher import excepthook

        excepthook.install()


def _register_object(value: Any, kind: str, place: str) -> None:
    """Register a model or an optimizer with the place where the script made it; models wait for an optimizer."""
    import weakref
    from functools import partial

    if kind == "optimizer":
        _register_optimizer(value)
    elif state.discovery is None:  # a script without optimizer is recognised by the missing discovery
        state.waiting.append((weakref.ref(value), kind, place))
        return
    waiting, state.waiting = state.waiting, []
    for reference, of, at in (*waiting, (weakref.ref(value), kind, place)):
        if (made := reference()) is not None:
            _apply_event(partial(_register_place, made, of, at))


def _register_place(value: Any, kind: str, place: str, found: ModelDiscovery) -> None:
    found.register_place(value, kind, place)


def _register_optimizer(optimizer: Any) -> None:
    """Register the parameters of an optimizer."""
    _apply_event(lambda found: found.register_optimizer(optimizer))


def _apply_event(event: Callable[[ModelDiscovery], None]) -> None:
    """Apply `event` to the discovery. An error in Gemini ends discovery with one line; the program goes on."""
    if os.getpid() != state.owner or state.session is None:
        return
    try:
        event(state.model_discovery())
    except Exception as fault:
        if state.session["flags"].get("strict"):
            raise
        if not state.session["quiet"]:
            from gemini.log import log_line

            reason = f"{type(fault).__name__}: {fault}"
            log_line(f"gemini: the program runs as under python: model discovery failed: {reason}")
        state.session = None


def _end_run() -> None:
    """Record the run; print one line where a program that imported torch ends without an error and trained nothing."""
    if os.getpid() != state.owner or state.session is None:
        return
    _record_run(state.session)
    _write_report(state.session)
    if state.session["quiet"] or hasattr(sys, "last_value"):
        return
    found = state.discovery
    if found is not None and found.models:
        _print_closing_lines(state.session)
    else:
        from contextlib import suppress

        from gemini.log import log_line

        what = _NOTHING if found is None or not found.layers else _LAYERS
        with suppress(OSError, ValueError, AttributeError):  # standard error is closed
            log_line(f"gemini: {what}: the program ran as under python")


def _print_closing_lines(session: Session) -> None:
    """Print what became of the models with workers."""
    from contextlib import suppress

    with suppress(Exception):  # standard error is closed, or the configuration is faulty
        from gemini.launcher.defaults import load_config
        from gemini.launcher.run_summary import closing_lines
        from gemini.log import log_line
        from gemini.runtime.run_journal import journaled_models

        for line in closing_lines(journaled_models(), load_config(session, state.folder)):
            log_line(f"gemini: {line}")


def _write_report(session: Session) -> None:
    """Write the page of the run where the configuration requests one."""
    from contextlib import suppress

    with suppress(Exception):  # standard error is closed, or the configuration is faulty
        from pathlib import Path

        from gemini.launcher.defaults import load_config

        config = load_config(session, state.folder)
        if config.report is not None and not config.dry_run:
            from gemini.report.run_end import write_now

            write_now(config, Path(config.run_folder).resolve())


def _record_run(session: Session) -> None:
    """Make `gemini explain` report this run even if no model of it has a journal entry."""
    from contextlib import suppress

    with suppress(Exception):  # a faulty configuration has been reported already
        from pathlib import Path

        from gemini.launcher.defaults import load_config

        config = load_config(session, state.folder)
        if not config.dry_run:
            from gemini.runtime.run_journal import record_idle_run

            record_idle_run(Path(config.run_folder).resolve())
