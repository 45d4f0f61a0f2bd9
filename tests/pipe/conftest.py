"""Models here are tiny: one thread is faster than several. Costs are estimated: nothing depends on the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import pipe_model
from gemini.partition import Options
from gemini.pipe import Piped

DEFAULTS: dict[str, Any] = {"analytic": "cpu", "cache": False, "options": Options(mixed=False)}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pipe() -> Callable[..., Piped]:
    """`pipe_model` on estimated costs, one stage a worker unless options say otherwise."""

    def make(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Any = None, **settings: Any) -> Piped:
        return pipe_model(model, args, kwargs, **{**DEFAULTS, **settings})

    return make
