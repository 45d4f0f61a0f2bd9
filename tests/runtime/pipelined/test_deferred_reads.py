"""Deferred values that are read late have the contents of their own step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import STEPS, made, manage, train
from tests.programs.training_steps import Program, batch


class Judged(nn.Module):
    """Returns its loss, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Right(nn.Module):
    """A metric: what it has seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.seen = torch.tensor(0), 0

    def forward(self, logits: torch.Tensor, y: torch.Tensor) -> None:
        self.right = self.right + (logits.argmax(1) == y).sum()
        self.seen += len(y)
        self.last = logits.mean()


class Measured(Judged):
    """With a metric, and lists of what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.losses, self.outputs = Right(), [], {}  # type: ignore[var-annotated]


def _compare(program: Program, pool: WorkerPool) -> None:
    reference = made(program)
    model = copy.deepcopy(reference)
    expected = train(reference, program)
    story = manage(model, pool)
    for one, other in zip(train(model, program), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps.get("overlapped", 0) >= STEPS - 2, str(story)


def _attacked(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """Weights are moved past autograd, and back, before the loss is read: adversarial training of an embedding."""
    x, y = batch(step)
    optimizer.zero_grad()
    loss = model(x, y)["loss"]
    (loss / 1).backward()
    weight = model.body[0].weight
    before = weight.data.clone()
    weight.data.add_(0.1 * weight.grad / weight.grad.norm())
    other = model(x, y)["loss"]
    (other / 1).backward()
    weight.data = before
    seen = [loss.detach().clone(), other.item()]
    optimizer.step()
    return seen


def _measured(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    x, y = batch(step)
    optimizer.zero_grad()
    out = model(x, y)
    model.metric(out["logits"], y)
    model.losses.append(out["loss"].detach())
    model.outputs[step] = {"logits": out["logits"].detach()}
    model.largest = out["logits"].max()
    out["loss"].backward()
    optimizer.step()
    if step < STEPS - 1:
        return []
    assert model.metric.seen == 8 * STEPS
    kept = [model.metric.right, model.metric.last.detach(), model.largest.detach(), *model.losses]
    return [one.clone() for one in kept] + [one["logits"].clone() for one in model.outputs.values()]


def test_a_mean_is_read_after_weights_were_moved(pool: WorkerPool) -> None:
    _compare(Program(Judged, _attacked), pool)


def test_what_is_put_off_may_be_kept_in_attributes_of_the_model(pool: WorkerPool) -> None:
    _compare(Program(Measured, _measured), pool)


def _closed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """The optimizer calls for loss and gradients itself, and changes the weights before the metric is read."""
    x, y = batch(step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss, logits = (model(x, y)[name] for name in ("loss", "logits"))
        model.metric(logits, y)
        model.losses.append(logits.detach().var())
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    model.eval()
    with torch.no_grad():
        seen = [model(x, y)["loss"], loss.detach().clone(), model.metric.right.clone(), model.losses[-1].clone()]
    model.train()
    return seen


def test_what_a_closure_leaves_is_there_after_the_step(pool: WorkerPool) -> None:
    _compare(Program(Measured, _closed), pool)


class Scaled(Judged):
    """Reads numbers and a tensor in attributes that the program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = 1.0, torch.zeros(())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * self.scale + self.shift, y)


def _moved(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    """Attributes get new values between the call and its backward: the call was made with those before."""
    x, y = batch(step)
    optimizer.zero_grad()
    model.scale, model.shift = 1.0, torch.zeros(())
    loss = model(x, y)["loss"]
    model.scale, model.shift = 3.0, torch.ones(())
    model.added = step
    loss.backward()
    optimizer.step()
    return [loss.detach().clone(), model.scale, model.shift, model.added]


def test_attributes_that_change_between_call_and_backward_are_those_of_the_call(pool: WorkerPool) -> None:
    _compare(Program(Scaled, _moved), pool)
