"""Parts of a model that draw from NumPy's generator are detected as such."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.FloatTensor(np.random.normal(0, 1, x.shape))


class Encoder(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.noise = Noise() if inside else None

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return torch.FloatTensor(np.random.normal(0, 1, x.shape)) + x  # which the tracer has not seen made

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(x)
        return x, self.noisy(x) if self.noise is None else self.noise(x)


def plan(model: nn.Module) -> bool:
    return plan_step(model, (torch.randn(4, 6),), {}, PlanRequest(2, 2, schedule="1f1b", cache=False)).uses_host_rng


def test_functions_are() -> None:
    assert plan(Encoder(inside=False))


def test_modules_have_no_plan() -> None:
    with pytest.raises(UnplannableError, match=r"noise .* NumPy"):
        plan(Encoder(inside=True))


class Averaging(Encoder):
    """The function calls a layer, which keeps something of every run."""

    def __init__(self) -> None:
        super().__init__(inside=False)
        self.norm = nn.BatchNorm1d(8)

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.FloatTensor(np.random.normal(0, 1, x.shape)) + x)


def test_functions_that_compute_with_weights_have_no_plan() -> None:
    model = Averaging()
    with pytest.raises(UnplannableError, match=r"noisy .* NumPy"):
        plan(model)
    assert model.norm.num_batches_tracked == 0
