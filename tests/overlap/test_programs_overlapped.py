"""Programs train with whole steps in workers as they do in one process: losses, what they print, weights, generator."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.overlap.programs import PROGRAMS, Program

STEPS, PIECES = 5, 4


def manage(model: nn.Module, pool: WorkerPool, schedule: str = "auto", *, strict: bool = True) -> ModelJournal:
    managed = ManagedModel(model, pool, quiet=True, micro_batches=PIECES, strict=strict)
    story = ModelJournal(type(model).__name__, len(pool.workers))
    wish = PlanRequest(len(pool.workers), PIECES, schedule=schedule, cache=False)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    return story


def train(model: nn.Module, program: Program) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(STEPS):
        seen += program.step(model, optimizer, step)
    return [*seen, torch.get_rng_state()]


def made(program: Program) -> nn.Module:
    torch.manual_seed(1)
    return program.make().double()


@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_one_process(name: str, pool: WorkerPool) -> None:
    program = PROGRAMS[name]
    reference = made(program)
    model = copy.deepcopy(reference)
    expected = train(reference, program)
    story = manage(model, pool)
    found = train(model, program)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for (key, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert not any("InternalFault" in reason for reason in story.reasons), str(story)
    if program.path:
        assert story.steps.get(program.path, 0) >= STEPS - 2, str(story)
    if program.path == "undivided":
        assert "overlapped" not in story.steps, str(story)
