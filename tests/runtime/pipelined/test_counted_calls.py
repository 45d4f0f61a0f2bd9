"""Every call of a model is counted by its path, and every one on a slower path by its reason."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.pipelined_runs import manage

CALLS = 6
FIRST = {
    "local: the first call shows which modules the model calls": 1,
    "eager dispatch: the first call of its size shows what is returned": 1,
}


class Impure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (os.getpid() > 0)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module) -> None:
    for _ in range(CALLS):
        model(torch.ones(8, 4)).sum().backward()


def check(story: ModelJournal, reasons: dict[str, int]) -> None:
    assert sum(story.steps.values()) == CALLS
    assert story.reasons == reasons


def test_calls_by_a_plan(pool: WorkerPool) -> None:
    model = make()
    story = manage(model, pool)
    train(model)
    check(story, FIRST)
    assert story.steps == {"local": 1, "dispatched": 1, "overlapped": CALLS - 2}


def test_a_guard_is_counted_while_it_holds(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    story = manage(model, pool, strict=False)
    relu: Callable[..., torch.Tensor] = F.relu
    monkeypatch.setattr(F, "relu", lambda *args, **kwargs: 1 * relu(*args, **kwargs))
    train(model)
    ((line, count),) = story.reasons.items()
    assert line.startswith("local: ")
    assert "relu" in line
    check(story, {line: CALLS})
    assert count == CALLS == story.steps["local"]


def test_code_that_is_not_proven_pure(pool: WorkerPool) -> None:
    model = nn.Sequential(make(), nn.Linear(2, 4), Impure())
    story = manage(model, pool, strict=False)
    train(model)
    (line,) = [line for line in story.reasons if "getpid" in line]
    check(story, {line: CALLS - 1, next(iter(FIRST)): 1})
    assert line.startswith("eager dispatch: ")
    (reason,) = [reason for reason in story.modules if "getpid" in reason]
    assert story.modules[reason] == ["2"]


def test_modules_with_tensors_that_cannot_be_shared(pool: WorkerPool) -> None:
    model = nn.Sequential(make(), make())[:1]
    model[0][0].register_buffer("sparse", torch.eye(3).to_sparse())
    story = manage(model, pool, strict=False)
    train(model)
    assert sum(story.steps.values()) == CALLS
    assert any("shared memory" in reason and "0.0" in names for reason, names in story.modules.items()), str(story)


def test_eager_dispatch_without_a_planner_is_counted(pool: WorkerPool) -> None:
    model = make()
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    train(model)
    check(managed.journal, {next(iter(FIRST)): 1})
    assert managed.journal.steps == {"local": 1, "dispatched": CALLS - 1}
