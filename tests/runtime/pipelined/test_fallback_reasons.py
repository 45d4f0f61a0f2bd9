"""The reason of a slower path is the true one, complete and one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import ProfileError
from gemini.runtime.call_outcome import FallbackReason, describe_failure, describe_planning_error
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage


def test_all_that_is_wrong_is_said_and_not_what_to_do() -> None:
    error = ProfileError("the batch does not fit the graph:\n  - x is missing\n  - y is float32[3]\n    → capture it")
    assert describe_planning_error(error) == "the batch does not fit the graph: - x is missing - y is float32[3]"
    assert describe_planning_error(ValueError()) == "ValueError"


def test_a_failure_is_named_by_its_kind_and_first_line() -> None:
    assert describe_failure(RuntimeError("no\nmore")) == "RuntimeError: no"


class Drawing(nn.Module):
    """With a random op, and a buffer that its calls write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


REASONS: dict[FallbackReason, Callable[[nn.Module, torch.Tensor], Any]] = {
    FallbackReason.READ_EARLY: lambda _, y: y.detach().numpy(),
    FallbackReason.DRAWN_EARLY: lambda _, y: torch.rand(len(y)),
    FallbackReason.WRITTEN_EARLY: lambda model, _: model.last.weight.data.add_(0.1),
    FallbackReason.BUFFERS_READ: lambda model, _: model.last.running_mean + 1,
    FallbackReason.UNUSUAL_BACKWARD: lambda _, y: y.backward(torch.ones_like(y)),
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda one: one.name.lower())
def test_what_the_script_does_between_call_and_loss_is_named(reason: FallbackReason, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Drawing()
    journal = manage(model, pool)
    for step in range(5):
        y = model(torch.randn(8, 6))
        if step >= 3:
            REASONS[reason](model, y)
        if reason is not FallbackReason.UNUSUAL_BACKWARD or step < 3:
            y.square().mean().backward()
    assert journal.steps["overlapped"] >= 1, journal
    counts = {
        known: sum(journal.reasons[line] for line in journal.reasons if line.endswith(f": {known}"))
        for known in REASONS
    }
    assert {known: count for known, count in counts.items() if count} == {reason: 2}, journal
