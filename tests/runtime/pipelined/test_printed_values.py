"""A deferred loss prints its value and `grad_fn` as without workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import manage
from tests.programs.training_steps import batch


class Net(nn.Module):
    """Returns logits, or its loss."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, CLASSES))
        self.has_loss = has_loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.layers(x)
        return F.cross_entropy(logits, y) if self.has_loss else logits


def entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, y)


def squared(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, F.one_hot(y, CLASSES).to(output)) / 2


def halved(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(output, y)
    loss /= 2
    return loss


def its_own(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output


LOSSES: list[Callable[..., torch.Tensor]] = [entropy, squared, halved, its_own]


def printed(model: nn.Module, loss_of: Callable[..., torch.Tensor]) -> list[Any]:
    seen: list[Any] = []
    for number in range(6):
        x, y = batch(number)
        loss = loss_of(model(x, y), y)
        if number % 2:
            seen.append(str(loss))
        loss.backward()
        seen += [str(loss), repr(loss.grad_fn).partition(" at ")[0]]
    return seen


@pytest.mark.parametrize("loss_of", LOSSES)
def test_printed_as_without_workers(loss_of: Callable[..., torch.Tensor], pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Net(has_loss=loss_of is its_own).double()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    assert printed(model, loss_of) == printed(reference, loss_of)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)


def kept(model: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outputs = []
    for number in range(5):
        x, y = batch(number)
        outputs.append(model(x, y))
        optimizer.zero_grad()
        F.cross_entropy(outputs[-1], y).backward()
        optimizer.step()
    seen = [(one.grad_fn.name(), one.retains_grad, one._base, str(one)) for one in outputs]
    for one in outputs:
        one.register_hook(print)
    return seen


def test_outputs_of_earlier_steps_are_looked_at_as_without_workers(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Net(has_loss=False).double()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    assert kept(model) == kept(reference)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)
