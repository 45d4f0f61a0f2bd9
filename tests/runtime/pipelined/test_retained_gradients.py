"""Gradients that a program retains stay unchanged; the memory of all others is reused."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal


class Tied(nn.Module):
    """Large and small gradients, one that two stages give, and one that some steps do not give."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 160)
        self.first, self.second = nn.Linear(160, 160), nn.Linear(160, 160)
        self.norm, self.spare = nn.LayerNorm(160), nn.Linear(160, 160)

    def forward(self, ids: torch.Tensor, use: bool = False) -> torch.Tensor:
        """Logits."""
        x = self.first(self.words(ids)).relu()
        x = self.norm(x + self.second(x).relu())
        x = self.spare(x) if use else x
        return x @ self.words.weight.t()


@pytest.fixture
def models(pool: WorkerPool) -> tuple[nn.Module, nn.Module, ModelJournal]:
    """The same model twice, one of them in workers."""
    torch.manual_seed(0)
    model = Tied().double()
    alone = copy.deepcopy(model)
    managed = ManagedModel(model, pool, quiet=True, micro_batches=4, strict=True)
    story, wish = ModelJournal("Tied", 2), PlanRequest(2, 4, cache=False)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    return model, alone, story


def test_what_is_kept_stays_and_what_is_not_is_used_again(models: tuple[nn.Module, nn.Module, ModelJournal]) -> None:
    model, alone, story = models
    draw = random.Random(1)
    kept: list[tuple[object, torch.Tensor, torch.Tensor]] = []  # somebody's hold, what it looks at, what it was
    for step in range(14):
        ids = torch.randint(0, 64, (8, 6), generator=torch.Generator().manual_seed(step))
        use, twice = step % 5 == 4, step % 4 == 3
        for _ in range(1 + twice):
            for one in (model, alone):
                F.cross_entropy(one(ids, use=use).flatten(0, 1), ids.flatten()).backward()
        for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), name
            if mine.grad is not None and its.grad is not None:
                torch.testing.assert_close(mine.grad, its.grad)
                if draw.random() < 0.2:
                    kept.append((*_held(mine.grad, draw.randrange(4)), its.grad.clone()))
        if draw.random() < 0.3 and model.first.weight.grad is not None:  # type: ignore[union-attr]
            model.first.weight.grad.share_memory_()  # type: ignore[union-attr]
        for one in (model, alone):
            one.zero_grad(set_to_none=step % 3 != 2)
        if step == 8:
            kept = kept[::3]
        if step % 3 == 2:  # in place: whoever holds a gradient sees it
            kept.clear()
        for _, seen, then in kept:
            torch.testing.assert_close(seen.view_as(then), then)
    assert story.steps["overlapped"] >= 8


def _held(gradient: torch.Tensor, how: int) -> tuple[object, torch.Tensor]:
    """Somebody's hold of a gradient, and a tensor through which it is looked at later."""
    if how == 0:
        return gradient, gradient
    if how == 1:
        return None, gradient.detach().flatten()
    if how == 2:
        return None, torch.from_numpy(gradient.numpy())
    storage, start, shape = gradient.untyped_storage(), gradient.storage_offset(), gradient.shape
    return storage, torch.empty(0, dtype=gradient.dtype).set_(storage, start, shape, gradient.stride())
