"""Warnings are shown once, as in one process, wherever the code that warns runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch


class Warns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = F.softplus(F.log_softmax(self.layers(x)))
        return found


def test_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    torch.manual_seed(0)
    model = Warns()
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("default", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)

        def show(message: Warning | str, *_: Any) -> None:
            shown.append(str(message))

        monkeypatch.setattr(warnings, "showwarning", show)
        parallel = GeminiCompiler().compiler(model, config=config)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            loss = F.cross_entropy(parallel(torch.randn(8, 16)), torch.arange(8) % 4, size_average=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 2
    assert len([text for text in shown if "Implicit dimension" in text]) == 1
    assert len([text for text in shown if "size_average" in text]) == 1


class Implicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layers(x))


def test_of_torch_they_name_lines_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []
    torch.manual_seed(0)
    model = Implicit()
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("default", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)

        def show(message: Warning | str, category: Any, filename: str, *_: Any) -> None:
            del category
            shown.append((str(message)[:19], filename))

        monkeypatch.setattr(warnings, "showwarning", show)
        parallel = GeminiCompiler().compiler(model, config=config)
        for step in range(5):
            made = parallel(torch.randn(8, 16))
            loss = F.nll_loss(made, torch.arange(8) % 4) if step < 3 else F.mse_loss(made, torch.zeros(4))
            loss.backward()
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 2
    assert shown == [("Implicit dimension ", __file__), ("Using a target size", __file__)]
