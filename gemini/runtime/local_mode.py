"""Local mode: a thread runs everything in this process for a while, managed models included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LocalMode(threading.local):
    """Whether local mode is on, per thread."""

    is_set: bool = False


LOCAL_MODE = LocalMode()


@contextmanager
def run_locally() -> Iterator[None]:
    """Run everything in this process for a while."""
    before, LOCAL_MODE.is_set = LOCAL_MODE.is_set, True
    try:
        yield
    finally:
        LOCAL_MODE.is_set = before
