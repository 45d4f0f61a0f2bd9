"""Buffers and tensor attributes may be replaced while training, at any size."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

CLASSES, FEATURES = 3, 6


class Scaled(nn.Module):
    """Holds tensors beside its layers, in which stages are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(FEATURES, 9), nn.Linear(9, 9), nn.Linear(9, CLASSES)
        self.scale = torch.tensor(1.0, dtype=torch.float64)
        self.register_buffer("shift", torch.zeros(9))
        self.ramp: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.ramp is None or self.ramp.shape[0] != length:  # as masks are made anew for each length
            self.ramp = torch.arange(length, dtype=torch.float64) / length
        h = torch.tanh(self.one(x)) * self.scale + self.shift
        return self.three(torch.tanh(self.two(h)) + self.ramp[-1]).mean(1)


def _replace_attribute(model: Scaled, step: int) -> None:
    if step == 5:
        model.scale = torch.tensor(2.5, dtype=torch.float64)


def _replace_buffer(model: Scaled, step: int) -> None:
    if step == 5:
        model.shift = torch.linspace(0, 1, 9, dtype=torch.float64)


def train(model: Scaled, change: Callable[[Scaled, int], None], lengths: tuple[int, ...]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    told = []
    for step in range(9):
        change(model, step)
        x = torch.randn(8, lengths[step % len(lengths)], FEATURES, generator=generator, dtype=torch.float64)
        loss = F.cross_entropy(model(x), torch.randint(CLASSES, (8,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


@pytest.mark.parametrize(
    ("change", "lengths", "least"),
    [
        (_replace_attribute, (4,), 7),
        (_replace_buffer, (4,), 7),
        (lambda *_: None, (4, 4, 4, 3), 3),
        (_replace_attribute, (4, 2, 2), 1),
    ],
    ids=["an attribute", "a buffer", "one for each length", "both"],
)
def test_what_a_model_holds_is_what_steps_use(
    change: Callable[[Scaled, int], None], lengths: tuple[int, ...], least: int, pool: WorkerPool
) -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    expected = train(copy.deepcopy(model), change, lengths)
    story = manage(model, pool)
    assert train(model, change, lengths) == pytest.approx(expected, rel=1e-12)
    assert story.steps[CallPath.OVERLAPPED] >= least
