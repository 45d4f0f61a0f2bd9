"""A model that changes while training is planned again and trains as in one process."""

from __future__ import annotations

import copy

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
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return self.head(x * self.scale if self.scale != 1.0 else x)


def train(model: Scaled) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(10):
        if step == 5:
            model.scale = 0.5
        x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_is_planned_again(tmp_path):
    torch.manual_seed(0)
    model = Scaled()
    expected = train(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 6
    assert not any("was changed" in reason for reason in managed.pipelined.journal.reasons)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(24, 8), nn.Softmax(-1), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("layer", "setting", "value"), [(3, "dim", 0), (0, "scale_grad_by_freq", True), (3, "__class__", nn.Softmin)]
)
def test_samples_that_meet_from_then_on(layer, setting, value, tmp_path):
    torch.manual_seed(0)
    model = Attending()
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    gradients = []
    for one in (copy.deepcopy(model), GeminiCompiler().compiler(model, config)):
        generator = torch.Generator().manual_seed(0)
        for step in range(7):
            if step == 4:
                setattr(one.layers[layer], setting, value)
            x, y = torch.randint(9, (8, 3), generator=generator), torch.randint(3, (8,), generator=generator)
            one.zero_grad()
            F.cross_entropy(one(x), y).backward()
        gradients.append(one.layers[0].weight.grad)
    torch.testing.assert_close(*gradients)
