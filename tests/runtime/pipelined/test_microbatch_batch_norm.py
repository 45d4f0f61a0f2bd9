"""Batch normalization per micro-batch equals a loop with gradient accumulation, running averages included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
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
from tests.models import CLASSES, Layer, Normed
from tests.programs.training_steps import batch

PIECES, STEPS, SAMPLES = 4, 5, 10


class Images(nn.Module):
    """Convolutions, averages without momentum, a layer that is frozen, dropout, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 12, 3), nn.Conv1d(12, 12, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(12), nn.BatchNorm1d(12, momentum=None), nn.BatchNorm1d(12)])
        self.layer, self.leave = Layer(0.2), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.norms[2].eval()
        x = self.norms[0](self.first(x[:, None])).relu()
        x = self.norms[2](self.norms[1](self.second(x))).mean(-1)
        logits = self.leave(self.layer(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def manage(model: nn.Module, pool: WorkerPool, own: bool = True) -> ModelJournal:
    managed = ManagedModel(model, pool, quiet=False, micro_batches=PIECES, strict=True)
    story, wish = ModelJournal(type(model).__name__, 2), PlanRequest(2, PIECES, micro_batch_statistics=own, cache=False)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    return story


def train(model: nn.Module, loss_of: Callable[..., Any]) -> list[float]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        seen.append(loss_of(model, *batch(step, SAMPLES), step))
        optimizer.step()
    return seen


def accumulated(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> float:
    """The first call is that of the whole batch; then a loop over micro-batches."""
    total = 0.0
    for part, targets in zip(*[one.tensor_split(PIECES if step else 1) for one in (x, y)], strict=True):
        loss = F.cross_entropy(model(part), targets) * len(targets) / SAMPLES
        loss.backward()
        total += loss.item()
    return total


def usual(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> float:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def test_equals_a_loop_that_accumulates(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    reference = Normed().double()
    model = copy.deepcopy(reference)
    expected = train(reference, accumulated)
    story = manage(model, pool)
    found = train(model, usual)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for (key, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")
    assert int(model.layers[1].num_batches_tracked) == 1 + PIECES * (STEPS - 1)
    assert story.steps["overlapped"] == STEPS - 2, str(story)


def test_a_call_by_the_plan_equals_one_in_pieces(pool: WorkerPool) -> None:
    """Reruns and calls that cannot run by the plan give what it gives: the graph may be differentiated twice."""
    torch.manual_seed(0)
    model = Images().double()
    story = manage(model, pool)
    x, y = batch(0, SAMPLES)
    for _ in range(2):
        model(x, y)["loss"].backward()
    before = copy.deepcopy(model.state_dict())
    seen = []
    for way in ("plan", "pieces"):
        model.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(1)
        out = model(x, y)
        if way == "pieces":
            out["logits"].retain_grad()  # asks for more than the plan gives
        out["loss"].backward(retain_graph=True)
        out["loss"].backward()
        grads = [p.grad.clone() for p in model.parameters()]
        averages = [b.clone() for b in model.buffers()]
        seen.append([out["loss"].detach(), out["logits"].detach(), *grads, *averages, torch.get_rng_state()])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps["overlapped"] >= 1, str(story)


def test_without_opting_in_the_batch_is_one_and_one_line_says_so(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Normed().double()
    story = manage(model, pool, own=False)
    train(model, usual)
    lines = [line for line in capsys.readouterr().err.splitlines() if "a batch as" in line]
    assert len(lines) == 1
    assert "Normed runs a batch as a single micro-batch: batch normalization in training (layers.1)" in lines[0]
    assert "batch_norm='micro-batch'" in lines[0]
    assert "overlapped" not in story.steps


def test_frozen_batch_normalization_overlaps_without_opting_in(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    reference = Normed().double()
    reference.layers[1].eval()
    model = copy.deepcopy(reference)
    expected = train(reference, usual)
    story = manage(model, pool, own=False)
    torch.testing.assert_close(train(model, usual), expected, rtol=1e-10, atol=1e-12)
    assert story.steps["overlapped"] == STEPS - 2, str(story)
