"""Keeping warnings silent inside the user's process, without a trace in it.

`warnings.catch_warnings` marks the filters as changed, which makes Python forget the warnings that the program has
shown already, and show them again. So filters are put before those that there are, and taken out again; what others do
with `catch_warnings` for us is not marked.
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
def muted(*categories: type[Warning], message: str = "") -> Iterator[None]:
    """Without warnings of these kinds, all where none is given, whose text begins like `message` (a pattern)."""
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
def unmarked() -> Iterator[None]:
    """Filters may be changed and put back, and nobody forgets anything; for short, as other threads wait."""
    module: Any = warnings
    with _marking:
        mark = module._filters_mutated
        module._filters_mutated = lambda: None
        try:
            yield
        finally:
            module._filters_mutated = mark
