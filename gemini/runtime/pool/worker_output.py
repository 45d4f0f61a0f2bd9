"""Worker output: what modules print, warn and log in a worker is repeated in the controller."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from gemini.runtime.pool.signals import note_user_code
from gemini.runtime.protocol import Logged, Printed, Warned

_registries: dict[str, dict[Any, Any]] = {}  # by file: the warnings that were shown


def replay_output(message: Any) -> None:
    """Print, warn or log in this process. Raises if the script turns warnings into errors."""
    note_user_code()
    if isinstance(message, Printed):
        stream = getattr(sys, message.stream, None)
        if stream is not None:
            stream.write(message.text)
    elif isinstance(message, Warned):
        registry = _registry_of(message.file)
        warnings.warn_explicit(message.text, message.category, message.file, message.line, registry=registry)
    elif isinstance(message, Logged):
        record = logging.makeLogRecord(message.record)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _registry_of(file: str) -> dict[Any, Any]:
    """Return the warning registry of a file: a warning that the script has shown itself is not shown again."""
    if file not in _registries:
        for module in [*sys.modules.values()]:
            if getattr(module, "__file__", None) == file:
                _registries[file] = vars(module).setdefault("__warningregistry__", {})
                break
        else:
            _registries[file] = {}
    return _registries[file]
