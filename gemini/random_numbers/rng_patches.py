"""Doors: the functions of torch through which nearly all code draws.

To see every op of a stage costs time; to see those inside a dropout costs next to none. A stage all of whose draws came
through doors when it was recorded needs to be watched there only. Doors are in place while a stage runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gemini.random_numbers.random_ops import PATCHED

Watch = Callable[[], AbstractContextManager[Any]]


class _Watching(threading.local):
    by: Watch | None = None


_watching = _Watching()


def _patch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _watching.by
        if watch is None:
            return original(*args, **kwargs)
        _watching.by = None  # doors behind this one are seen already
        try:
            with watch():
                return original(*args, **kwargs)
        finally:
            _watching.by = watch

    return call


_originals = [getattr(owner, name) for owner, name in PATCHED]
_patches = [_patch(original) for original in _originals]


@contextmanager
def watch_random_functions(watch: Watch) -> Iterator[None]:
    """Run what this thread sends through a door inside `watch()`."""
    before, _watching.by = _watching.by, watch
    for (owner, name), door in zip(PATCHED, _patches, strict=True):
        setattr(owner, name, door)
    try:
        yield
    finally:
        for (owner, name), original in zip(PATCHED, _originals, strict=True):
            setattr(owner, name, original)
        _watching.by = before
