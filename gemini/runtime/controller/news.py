"""News: what units print, warn and log in their worker happens here, where the program's own does."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from gemini.runtime.protocol import Logged, Said, Warned

_registries: dict[str, dict[Any, Any]] = {}  # by file: which warnings were shown


def repeat(news: Any) -> None:
    """Do here what was done there. Raises where the program has asked for warnings to be errors."""
    if isinstance(news, Said):
        stream = getattr(sys, news.stream, None)
        if stream is not None:
            stream.write(news.text)
    elif isinstance(news, Warned):
        registry = _registries.setdefault(news.file, {})
        warnings.warn_explicit(news.text, news.category, news.file, news.line, registry=registry)
    elif isinstance(news, Logged):
        record = logging.makeLogRecord(news.record)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
