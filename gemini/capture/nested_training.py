"""Nested training: a model that calls `backward()`, or an optimizer, in its `forward`.

Capture runs a forward more than once and cannot restore optimizer state (moments, step counts) or accumulated
gradients. So it refuses the model before either changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.errors import CaptureError


class _Refusing(threading.local):
    """Whether this thread refuses training."""

    depth = 0


class _Patches:
    """The replaced functions, for as long as any thread refuses training: captures of several threads may overlap."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._originals: tuple[Callable[..., Any], ...] = ()
        self._hook: Any = None

    def add_user(self) -> None:
        """Replace the functions for the first user."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._originals = torch.Tensor.backward, torch.autograd.backward
                self._hook = register_optimizer_step_pre_hook(lambda *_: _refuse("makes a step of an optimizer"))
                torch.Tensor.backward, torch.autograd.backward = map(_refuse_outermost, self._originals)

    def remove_user(self) -> None:
        """Restore the functions after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.Tensor.backward, torch.autograd.backward = self._originals
                self._hook.remove()


_refusing, _patches = _Refusing(), _Patches()


def _refuse(what: str) -> None:
    if _refusing.depth:
        raise CaptureError(f"its forward {what}")


def _refuse_outermost(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            _refuse("calls backward()")
        return original(*args, **kwargs)

    return backward


@contextmanager
def refuse_training() -> Iterator[None]:
    """Make `backward()` and optimizer steps raise CaptureError in this thread.

    A backward inside another one is allowed: checkpoints and reversible layers need it.
    """
    _patches.add_user()
    _refusing.depth += 1
    try:
        yield
    finally:
        _refusing.depth -= 1
        _patches.remove_user()
