"""The registry of classic models: name → how to make (model, args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
CLASSICS: dict[str, Callable[[], Made]] = {}


def classic(function: Callable[[], Made]) -> Callable[[], Made]:
    """Register a maker under its name; seeds are set so that every making is the same."""

    def make() -> Made:
        torch.manual_seed(0)
        model, args, kwargs = function()
        return model.train(), args, kwargs

    CLASSICS[function.__name__] = make
    return make
