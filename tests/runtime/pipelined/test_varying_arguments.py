"""Plain arguments that differ in every call stop being planned for."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.training_steps import batch


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 7))

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        return self.layers(x) / temperature


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step, temperature in enumerate([1.0 / (1 + at) for at in range(8)] + [1.0] * 3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, temperature=temperature), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_values_that_never_come_again_are_not_planned_for(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    reference = Tempered().double()
    model = copy.deepcopy(reference)
    managed = ManagedModel(model, pool, quiet=True, micro_batches=4, strict=True)
    story, wish = ModelJournal("Tempered", 2), PlanRequest(2, 4, schedule="1f1b", cache=False)
    plans: list[int] = []

    def planned(*call: object, **changes: object) -> object:
        plans.append(1)
        return plan_step(*call, replace(wish, **changes))  # type: ignore[arg-type]

    managed.pipelined = PipelinedModel(managed, planned, story)  # type: ignore[arg-type]
    dispatch.manage(model, managed)
    torch.testing.assert_close(train(model), train(reference), rtol=1e-10, atol=1e-12)
    assert len(plans) <= 4
    assert "differ in every call" in str(story)


def test_values_that_were_planned_for_in_vain_are_not_either(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tempered().double()
    managed = ManagedModel(model, pool, quiet=False, micro_batches=4, strict=True)
    plans: list[int] = []

    def planned(*_: object, **__: object) -> object:
        plans.append(1)
        raise UnplannableError(f"a tensor of shape ({len(plans)},)")

    story = ModelJournal("Tempered", 2)
    managed.pipelined = PipelinedModel(managed, planned, story)  # type: ignore[arg-type]
    dispatch.manage(model, managed)
    train(model)
    assert len(plans) == 3
    assert capsys.readouterr().err.count("a tensor of shape") == 1
    assert "a tensor of shape (3,)" in str(story)
