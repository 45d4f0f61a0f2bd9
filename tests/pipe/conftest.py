"""Costs are estimated, so that no test depends on the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from gemini import pipe_model
from gemini.partition import Options
from gemini.pipe import Piped

DEFAULTS: dict[str, Any] = {"analytic": "cpu", "cache": False, "options": Options(mixed=False)}


@pytest.fixture
def pipe() -> Callable[..., Piped]:
    """`pipe_model` on estimated costs, one stage per worker unless options say otherwise."""

    def make(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Any = None, **settings: Any) -> Piped:
        return pipe_model(model, args, kwargs, **{**DEFAULTS, **settings})

    return make
