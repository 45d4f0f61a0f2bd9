"""Exceptions of the user's model are not reported as internal failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiConfig
from gemini.planner.config_planner import planner_for
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.session import start


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 3))


def step(model: nn.Module, width: int = 8) -> None:
    F.cross_entropy(model(torch.randn(8, width)), torch.randint(3, (8,))).backward()


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_raises_is_not_told_as_a_failure_of_planning(tmp_path: Path, capsys: Any, strict: bool) -> None:
    model = net()
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, run_folder=str(tmp_path), strict=strict
    )  # fmt: skip
    managed = start(model, config, planner_for(config), announce=False, survives=True)
    assert managed is not None
    assert managed.pipelined is not None
    for width in (8, 8, 7, 8, 7, 8):
        if width == 8:
            step(model)
        else:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                step(model, width)
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 2
    assert not managed.demotions
    assert capsys.readouterr().err == ""


def test_where_only_planning_fails_that_is_told(tmp_path: Path, capsys: Any) -> None:
    def planner(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no plan")

    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, run_folder=str(tmp_path))
    model = net()
    managed = start(model, config, planner, announce=False, survives=True)
    assert managed is not None
    for _ in range(4):
        step(model)
    assert managed.demotions == 1
    assert "planning Sequential runs in this process: ZeroDivisionError: no plan" in capsys.readouterr().err
