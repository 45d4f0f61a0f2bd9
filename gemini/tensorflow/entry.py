"""Entry: patch TensorFlow in this process, so that its sessions run the twins of their graphs.

install(config)                     from now on: tf.gradients notes, sessions run twins
compile_function(model, config)     the same for a model function, whose result is checked
reports()                           what was done so far, one value per kind of step
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault
from gemini.log import log_line
from gemini.tensorflow.traced_functions import install_functions, uninstall_functions
from gemini.tensorflow.twin_report import TwinReport

_installed: list[GeminiConfig] = []
_reports: list[TwinReport] = []


def install(config: GeminiConfig) -> None:
    """Patch `tf.gradients` and the sessions of this process; a second call replaces the configuration."""
    from gemini.tensorflow.session_patches import patch

    _installed[:] = [config]
    _reports.clear()
    patch(_make_twin)
    install_functions(config, record)


def _make_twin(session: Any) -> Any:
    """Return the twin session of a session on its first run; None where it trains nothing yet, or elsewhere."""
    from gemini.tensorflow.gradient_notes import notes_of
    from gemini.tensorflow.session_patches import leave

    if session._target not in ("", b""):
        return None
    if not notes_of(session.graph):
        if any(op.type == "VarHandleOp" for op in session.graph.get_operations()):
            leave(session)  # its variables exist in it from now on
        return None
    from gemini.tensorflow.twin_session import TwinSession

    return TwinSession(session, _installed[0], record)


def uninstall() -> None:
    """Undo `install`; sessions that run twins keep them until they are closed."""
    from gemini.tensorflow.session_patches import unpatch

    _installed.clear()
    unpatch()
    uninstall_functions()


def is_installed() -> bool:
    """Whether `install` is in effect."""
    return bool(_installed)


def reports() -> tuple[TwinReport, ...]:
    """Return what was done so far, one report per kind of step."""
    return tuple(_reports)


def record(report: TwinReport) -> None:
    """Keep a report, and print its line once; a dry run ends with the first."""
    is_new = all(report.line != one.line for one in _reports)
    _reports.append(report)
    if not _installed or not is_new:
        return
    (config,) = _installed
    if not config.quiet:
        log_line(f"gemini: {report.line}")
    if config.verify:
        log_line(f"gemini: {report.comparison_line}")
    if config.dry_run:
        sys.exit(0)


def compile_function(model: Callable[..., Any], config: GeminiConfig) -> Callable[..., Any]:
    """Return the model function; training graphs built on its results run as `config` says.

    Raises ConfigError where the function returns nothing that is a tensor of a graph.
    """
    install(config)

    @wraps(model)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        if not _has_graph_tensors(result):
            name = getattr(model, "__name__", type(model).__name__)
            fault = Fault(
                f"{name} returned {type(result).__name__}, without any tensor of a graph",
                "return tensors, as in (logits, loss), and call the function under tf.compat.v1 graph mode",
            )
            raise ConfigError([fault], "GeminiCompiler.compiler")
        return result

    return compiled


def _has_graph_tensors(result: Any) -> bool:
    if isinstance(result, dict):
        return any(map(_has_graph_tensors, result.values()))
    if isinstance(result, (list, tuple)):
        return any(map(_has_graph_tensors, result))
    return hasattr(result, "op") and hasattr(result, "graph")
