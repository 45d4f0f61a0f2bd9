"""Quiet warnings: suppress warnings in the user's process without side effects.

`warnings.catch_warnings` marks the filters as changed, which resets Python's registry of shown warnings: the script's
warnings would show again. So filters are inserted in front and removed again, without marking them as changed.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_marking = threading.RLock()


@contextmanager
def mute_warnings(*categories: type[Warning], message: str = "") -> Iterator[None]:
    """Suppress warnings of these categories (default: all) whose text matches the pattern `message`."""
    text = re.compile(message, re.IGNORECASE) if message else None
    added = [("ignore", text, category, None, 0) for category in categories or (Warning,)]
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    filters[:0] = added
    try:
        yield
    finally:
        for one in added:
            if one in filters:
                filters.remove(one)


@contextmanager
def keep_warning_registry() -> Iterator[None]:
    """Let filters be changed and restored without resetting the registry of shown warnings. Other threads wait."""
    module: Any = warnings
    with _marking:
        mark = module._filters_mutated
        module._filters_mutated = lambda: None
        try:
            yield
        finally:
            module._filters_mutated = mark
