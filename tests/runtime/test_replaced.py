"""Functions and methods that a program has put in the place of those of libraries are its own process's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.controller.replaced import Methods, replaced

Patch = Callable[[pytest.MonkeyPatch], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 16), nn.Linear(16, 3), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(F.relu(self.first(x))))


def replace_function(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "relu", lambda x, inplace=False: torch.tanh(x) * 0.5)


def replace_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.GELU, "forward", lambda self, x: torch.tanh(x) * 0.5)


def train(model: nn.Module, replace: Patch, step: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for at in range(7):
            if at == step:
                replace(patch)
            loss = model(torch.randn(8, 6, generator=generator)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            seen.append(loss.item())
    return seen


@pytest.mark.parametrize("replace", [replace_function, replace_method])
@pytest.mark.parametrize(("schedule", "step"), [("auto", 0), ("auto", 4), ("none", 4)])
def test_the_programs_own_is_called(
    replace: Patch, schedule: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(copy.deepcopy(model), replace, step)
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, run_folder=str(tmp_path)
    )
    GeminiCompiler().compiler(model, config)
    assert train(model, replace, step) == pytest.approx(expected, rel=1e-5)
    name = "torch.nn.functional.relu" if replace is replace_function else "GELU.forward"
    assert f"the program has replaced {name}" in capsys.readouterr().err


def test_what_was_replaced_and_is_as_before_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = Methods(Net())
    assert not methods.obstacle()
    assert not replaced()
    with monkeypatch.context() as patch:
        replace_function(patch)
        assert replaced() == "torch.nn.functional.relu"
        replace_method(patch)
        assert "GELU.forward" in methods.obstacle()
    assert not methods.obstacle()
    assert not replaced()


def test_partial_functions_and_wrapped_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Any, **_: Any) -> Any:
        return x

    own = F.gelu
    for one in (functools.partial(other, k=1), functools.wraps(own)(other), functools.partial(own, approximate="tanh")):
        with monkeypatch.context() as patch:
            patch.setattr(F, "gelu", one)
            assert replaced() == "torch.nn.functional.gelu"
