"""No plan drops the gradient of a trainable tensor that is no parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step


class Searched(nn.Module):
    """Layers whose results are weighted by `alphas`, kept as the test says."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        keep(self, torch.ones(3, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.alphas[0] if isinstance(self.alphas, list) else self.alphas
        for layer, weight in zip(self.layers, weights.softmax(0), strict=True):
            x = torch.tanh(layer(x)) * weight
        return x


def attribute(model: Any, alphas: torch.Tensor) -> None:
    model.alphas = alphas


def in_a_list(model: Any, alphas: torch.Tensor) -> None:
    model.alphas = [alphas]


def buffer(model: Any, alphas: torch.Tensor) -> None:
    model.register_buffer("alphas", alphas)


def computed(model: Any, alphas: torch.Tensor) -> None:
    model.alphas = alphas * 2


@pytest.mark.parametrize("keep", [attribute, in_a_list, buffer, computed])
def test_it_is_not_planned(keep: Callable[[Any, torch.Tensor], None]) -> None:
    with pytest.raises(UnplannableError, match=r"alphas.* requires a gradient and is no parameter"):
        plan_step(Searched(keep), (torch.randn(8, 6),), {}, PlanRequest(workers=2, micro_batches=2))


def test_a_frozen_one_is_planned() -> None:
    model = Searched(lambda model, alphas: attribute(model, alphas.detach()))
    assert plan_step(model, (torch.randn(8, 6),), {}, PlanRequest(workers=2, micro_batches=2)).micro_batches == 2
