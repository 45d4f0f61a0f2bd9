"""Construction sites: models and optimizers of a script, with the place where each was made.

    net = __gemini__.model(Net())
    opt = __gemini__.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

Both return their argument. From `on_construction` on, its handler receives (object, "model" or "optimizer", place);
without one, as in a dump under plain python, they do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from gemini.launcher.script_api.script_devices import torch_module

T = TypeVar("T")
Handler = Callable[[Any, str, str], None]
_handlers: list[Handler] = []


def on_construction(handler: Handler) -> None:
    """Call `handler` for every model and optimizer that a script makes from now on."""
    _handlers[:] = [handler]


def model(value: T) -> T:
    """Return a model that the script has just made."""
    torch = torch_module()
    if _handlers and torch is not None and isinstance(value, torch.nn.Module):
        _handlers[0](value, "model", _caller())
    return value


def optimizer(value: T) -> T:
    """Return an optimizer that the script has just made."""
    torch = torch_module()
    if _handlers and torch is not None and isinstance(value, torch.optim.Optimizer):
        _handlers[0](value, "optimizer", _caller())
    return value


def _caller() -> str:
    """Return file and line of the call of `model` or `optimizer`."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
