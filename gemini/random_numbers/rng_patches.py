"""RNG patches: wrappers, while a stage runs, of the torch functions that contain nearly all random ops.

Intercepting every op of a stage is slow, intercepting those inside a dropout costs almost nothing. If all random ops
of a stage ran inside patched functions when it was recorded, only these are intercepted.
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
    watch: Watch | None = None


_watching = _Watching()


def _patch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = _watching.watch
        if watch is None:
            return original(*args, **kwargs)
        _watching.watch = None  # nested patched functions are already intercepted
        try:
            with watch():
                return original(*args, **kwargs)
        finally:
            _watching.watch = watch

    return call


_originals = [getattr(owner, name) for owner, name in PATCHED]
_patches = [_patch(original) for original in _originals]


@contextmanager
def watch_random_functions(watch: Watch) -> Iterator[None]:
    """Run the patched functions that this thread calls inside `watch()`."""
    before, _watching.watch = _watching.watch, watch
    for (owner, name), patch in zip(PATCHED, _patches, strict=True):
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for (owner, name), original in zip(PATCHED, _originals, strict=True):
            setattr(owner, name, original)
        _watching.watch = before
