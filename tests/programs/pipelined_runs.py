"""Train a program from `training_steps`, locally or pipelined over workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.training_steps import Program

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
