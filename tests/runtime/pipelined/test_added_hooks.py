"""Module hooks registered while training observe what they observe in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch

Hang = Callable[[nn.Module, list[float]], Any]
HOOKS: dict[str, Hang] = {
    "on a layer": lambda model, seen: model[3].register_forward_hook(lambda _, __, out: seen.append(out.sum().item())),
    "before a layer": lambda model, seen: model[2].register_forward_pre_hook(
        lambda _, x: seen.append(x[0].sum().item())
    ),
    "in backward": lambda model, seen: model[2].register_full_backward_hook(
        lambda _, __, out: seen.append(out[0].norm().item())
    ),
    "on all modules": lambda _, seen: register_module_forward_hook(lambda _, __, out: seen.append(out.sum().item())),
}


def train(model: nn.Module, hang: Hang) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    seen: list[float] = []
    handle = None
    for step in range(9):
        if step == 4:
            handle = hang(model, seen)
        if step == 6:
            handle.remove()  # type: ignore[union-attr]
        x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("name", HOOKS)
def test_they_run(name, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    expected = train(copy.deepcopy(model), HOOKS[name])
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config), HOOKS[name])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] == 5  # before and after
