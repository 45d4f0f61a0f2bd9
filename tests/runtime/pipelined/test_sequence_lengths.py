"""Calls of several sequence lengths share one plan and its stages where the model treats them equally."""

from __future__ import annotations

from dataclasses import replace

import torch

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.models import Text
from tests.programs.training_steps import six_lengths


def test_six_lengths_share_one_plan_and_its_stages(pool: WorkerPool) -> None:
    model = Text().double()
    managed = ManagedModel(model, pool, quiet=True, micro_batches=4, strict=True)
    story, wish = ModelJournal("Text", 2), PlanRequest(2, 4, cache=False)
    overlap = managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        six_lengths(model, optimizer, step)
    kinds = [kind for found in overlap.plans.kinds.values() for kind in found]
    assert len(kinds) == 6
    assert len({id(kind.plan.partition) for kind in kinds if kind.plan is not None}) == 1
    assert len({id((kind.origin or kind).executor) for kind in kinds}) == 1
    assert story.steps["overlapped"] >= 11
