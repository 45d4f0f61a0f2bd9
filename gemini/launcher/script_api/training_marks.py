"""Training marks: calls around the losses and optimizers of a script, which detect its first training step.

Each mark returns its argument and adds no frame around the script's own call:

    __gemini__.loss(loss).backward()
    __gemini__.step(optimizer).step()

The source does not distinguish the `step()` of an optimizer from that of a game, so a mark checks the type of its
argument. The marks check only from `on_first_step` until they meet a PyTorch object; before and after that they are
empty functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from gemini.launcher.script_api.script_devices import torch_module

T = TypeVar("T")


def identity(value: T) -> T:
    """Return `value`."""
    return value


loss = step = identity


def on_first_step(handler: Callable[[], None]) -> None:
    """Call `handler` once: at the first mark around a PyTorch loss, optimizer or gradient scaler."""

    def check_loss(value: T) -> T:
        torch = torch_module()
        if torch is not None and isinstance(value, torch.Tensor):
            notify()
        return value

    def check_step(value: T) -> T:
        torch = torch_module()
        if torch is not None and (_is_optimizer(value, torch) or isinstance(value, torch.amp.GradScaler)):
            notify()
        return value

    def notify() -> None:
        _replace_marks(identity, identity)
        handler()

    _replace_marks(check_loss, check_step)


def _replace_marks(on_loss: Callable[[Any], Any], on_step: Callable[[Any], Any]) -> None:
    """Set what instrumented source finds as `__gemini__.loss` and `__gemini__.step` at its next call."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.loss, namespace.step = on_loss, on_step


def _is_optimizer(value: Any, torch: ModuleType) -> bool:
    """Return whether `value` is an optimizer or wraps one without deriving from it, as accelerate's does.

    Only its class is inspected: an object of the script may run code on attribute lookups.
    """
    if isinstance(value, torch.optim.Optimizer):
        return True
    kind = type(value)
    return hasattr(kind, "zero_grad") and hasattr(kind, "step") and not isinstance(value, torch.nn.Module)
