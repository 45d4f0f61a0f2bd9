"""Weights that change dtype or layout while training are updated in every plan and worker."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    seen, dtype = [], torch.float32
    for step in range(12):
        if step == 4:
            model.to(memory_format=torch.channels_last)
        elif step in (6, 9):
            dtype = torch.float64 if step == 6 else torch.float32
            model.to(dtype)
        x = torch.randn(8, 2, 8, 8, generator=generator).to(dtype)
        y = torch.randint(3, (8,), generator=generator)
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():  # another plan, and the same weights
            seen += [loss.item(), F.cross_entropy(model(x), y).item()]
    with torch.enable_grad():
        seen.append(model.head(torch.ones(1, 64, dtype=dtype)).sum().item())
    return seen


@pytest.mark.slow
def test_all_know_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def train_turned(model: nn.Sequential) -> list[float]:
    """Weights that `.data` gives another form, in the very memory that they have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(9):
        if step == 4:
            model[2].weight.data = model[2].weight.data.t()
        elif step == 6:  # the first eight of sixteen
            model[2].weight.data, model[2].bias.data = model[2].weight.data[:8], model[2].bias.data[:8]
            model[4].weight.data = model[4].weight.data[:, :8]
        x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen += [loss.item(), float(model[4].weight.grad.abs().sum()), *map(float, model[2].weight.shape)]
        del loss  # the graph of a step knows sizes
    return seen


@pytest.mark.parametrize("schedule", ["auto", "none"])
def test_another_form_in_the_same_memory_is_seen(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    expected = train_turned(copy.deepcopy(model))
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, quiet=True, run_folder=str(tmp_path)
    )
    GeminiCompiler().compiler(model, config)
    torch.testing.assert_close(torch.tensor(train_turned(model)), torch.tensor(expected))
