"""A tensor attribute that starts to require gradients while training receives its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.scale = torch.ones(1)
        self.table = {"a": torch.ones(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x)) * self.scale * self.table["a"]


def turned_on(layer: Scaled) -> torch.Tensor:
    return layer.scale.requires_grad_()


def replaced(layer: Scaled) -> torch.Tensor:
    layer.scale = torch.ones(1, requires_grad=True)  # equal to what was there
    return layer.scale


def turned_on_in_a_table(layer: Scaled) -> torch.Tensor:
    return layer.table["a"].requires_grad_()


def replaced_in_a_table(layer: Scaled) -> torch.Tensor:
    layer.table["a"] = torch.ones(1, requires_grad=True)
    return layer.table["a"]


def train(model: nn.Module, begin: Callable[[Scaled], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    told = []
    learner = None
    for step in range(7):
        if step == 4:
            learner = begin(model[2])
            optimizer.add_param_group({"params": [learner]})
        x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        told += [loss.item(), 0.0 if learner is None or learner.grad is None else learner.grad.item()]
        optimizer.step()
    return told


@pytest.mark.parametrize("begin", [turned_on, replaced, turned_on_in_a_table, replaced_in_a_table])
def test_it_is_trained(tmp_path, begin):
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled() for _ in range(4)], nn.Linear(8, 3))
    expected = train(copy.deepcopy(model), begin)
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config), begin)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 2  # up to then
