"""With `rng="fast"` workers draw their own random numbers, reproducibly."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.pipelined_runs import PIECES, made
from tests.programs.training_steps import PROGRAMS, batch


class Masked(nn.Module):
    """Shows the masks of its dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 40), nn.Linear(40, 40)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.drop(self.first(x).abs() + 1)
        return x, self.drop(self.second(x).abs() + 1)


def manage(model: nn.Module, pool: WorkerPool) -> ModelJournal:
    managed = ManagedModel(model, pool, quiet=True, micro_batches=PIECES, strict=True)
    story = ModelJournal(type(model).__name__, len(pool.workers))
    wish = PlanRequest(len(pool.workers), PIECES, rng="fast", schedule="1f1b", cache=False)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    return story


def train(model: nn.Module) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_same_plan_and_seed_give_the_same_training(pool: WorkerPool) -> None:
    model = made(PROGRAMS["dropout"])
    before = copy.deepcopy(model.state_dict())
    story = manage(model, pool)
    train(model)
    seen = []
    for _ in range(2):
        model.load_state_dict(before)
        seen.append(train(model))
    assert seen[0] == seen[1]
    assert story.steps["overlapped"] == 13


def test_masks_differ_from_piece_to_piece_and_from_stage_to_stage(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Masked().double()
    story = manage(model, pool)
    for step in range(4):
        one, two = model(batch(step)[0])
        (one.sum() + two.sum()).backward()
    assert story.steps["overlapped"] == 2
    masks = [one.detach() != 0, two.detach() != 0]
    for mask in masks:
        assert 0.35 < float(mask.double().mean()) < 0.65
        assert len({tuple(row.tolist()) for row in mask}) == len(mask)
    assert not torch.equal(*masks)
