"""Here: a thread may have everything run in this process for a while, whatever is managed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Here(threading.local):
    """Whether it has."""

    is_set: bool = False


HERE = Here()


@contextmanager
def here() -> Iterator[None]:
    """Run everything in this process for a while."""
    before, HERE.is_set = HERE.is_set, True
    try:
        yield
    finally:
        HERE.is_set = before
