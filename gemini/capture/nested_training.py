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


@contextmanager
def refuse_training() -> Iterator[None]:
    """Make `backward()` and optimizer steps raise CaptureError in this thread.

    A backward inside another one is allowed: checkpoints and reversible layers need it.
    """
    thread, found = threading.get_ident(), (torch.Tensor.backward, torch.autograd.backward)

    def refuse(what: str) -> None:
        if threading.get_ident() == thread:
            raise CaptureError(f"its forward {what}")

    def refuse_outermost(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                refuse("calls backward()")
            return original(*args, **kwargs)

        return backward

    hook = register_optimizer_step_pre_hook(lambda *_: refuse("makes a step of an optimizer"))
    torch.Tensor.backward, torch.autograd.backward = map(refuse_outermost, found)
    try:
        yield
    finally:
        torch.Tensor.backward, torch.autograd.backward = found
        hook.remove()
