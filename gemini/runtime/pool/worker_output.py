"""News: what units print, warn and log in their worker happens here, where the program's own does."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from gemini.runtime.pool.signals import note_user_code
from gemini.runtime.protocol import Logged, Printed, Warned

_registries: dict[str, dict[Any, Any]] = {}  # by file: which warnings were shown, as its module here knows


def replay_output(news: Any) -> None:
    """Do here what was done there. Raises where the program has asked for warnings to be errors."""
    note_user_code()
    if isinstance(news, Printed):
        stream = getattr(sys, news.stream, None)
        if stream is not None:
            stream.write(news.text)
    elif isinstance(news, Warned):
        registry = _registry_of(news.file)
        warnings.warn_explicit(news.text, news.category, news.file, news.line, registry=registry)
    elif isinstance(news, Logged):
        record = logging.makeLogRecord(news.record)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _registry_of(file: str) -> dict[Any, Any]:
    """What has been shown of a file: a warning that the program has shown itself is not shown again."""
    if file not in _registries:
        for module in [*sys.modules.values()]:
            if getattr(module, "__file__", None) == file:
                _registries[file] = vars(module).setdefault("__warningregistry__", {})
                break
        else:
            _registries[file] = {}
    return _registries[file]
