"""Training inside a forward: a model that calls `backward()`, or its optimizer, in its own `forward`.

Capture runs a forward more than once, and nothing puts back what an optimizer keeps (moments, counts of steps), nor
gradients that have been added. So the run ends before either happens, and the model is not captured.
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
    """Inside, `backward()` and steps of optimizers raise CaptureError, in this thread.

    A backward within another one is part of that: checkpoints and reversible layers run theirs so.
    """
    thread, found = threading.get_ident(), (torch.Tensor.backward, torch.autograd.backward)

    def refuse(what: str) -> None:
        if threading.get_ident() == thread:
            raise CaptureError(f"its forward {what}")

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                refuse("calls backward()")
            return original(*args, **kwargs)

        return backward

    hook = register_optimizer_step_pre_hook(lambda *_: refuse("makes a step of an optimizer"))
    torch.Tensor.backward, torch.autograd.backward = map(instead, found)
    try:
        yield
    finally:
        torch.Tensor.backward, torch.autograd.backward = found
        hook.remove()
