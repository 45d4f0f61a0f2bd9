"""Models with uncommon layouts of their samples train by micro-batches as in one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import STEPS, manage, train
from tests.programs.training_steps import Program, batch, finish

D = 9


class Alone(nn.Module):
    """Its Python does otherwise with one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x))
        if len(x) == 1:
            h = h.expand(1, -1) * 2
        return self.two(torch.dropout(h, 0.1, self.training))


class Paired(Alone):
    """One sample is too few for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 2:
            raise ValueError("more than one value is expected")
        return super().forward(x)


class Careful(nn.Module):
    """Every layer asks whether what it has computed is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.dropout(torch.tanh(layer(x)), 0.1, self.training) + x
            if not torch.isfinite(x).all():
                x = x.clamp(-2.0, 2.0)
            if torch.isinf(x).any() or torch.isnan(x).any():
                raise ValueError("clamped, and still not finite")
        return self.head(x)


class Scale(nn.Module):
    """By the whole batch, and without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(0).clamp(min=0.5) - x.max()


class Scaled(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(self.scale(x))))


def spans(shape: tuple[int, int]) -> np.ndarray:
    """What SpecAugment leaves out: some places of every sample, drawn sample after sample."""
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        start = np.random.randint(shape[1] - 2)
        row[start : start + 1 + int(random.random() * 3)] = True
    return mask


def spans_like(hidden: torch.Tensor) -> np.ndarray:
    """The same for a value of which only the size matters."""
    return spans((hidden.shape[0], hidden.shape[1]))


class Spanned(nn.Module):
    """Leaves out places that Python's and NumPy's generators draw, and others that torch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.left_out = nn.Linear(D, 12), nn.Linear(12, CLASSES), nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor(spans((x.shape[0], x.shape[1])), device=x.device)
        x = torch.where(mask, self.left_out, x)
        h = self.one(x)
        h *= 0.5
        h = h.masked_fill(torch.tensor(spans_like(h), device=x.device), 0.1)
        return self.two(torch.dropout(torch.tanh(h), 0.2, self.training))


def drawn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    x, y = batch(step)
    output = model(x)
    others = [np.random.rand(), random.random()]  # where one device would be: the call has drawn
    if step == 2:
        x.mul_(2)
        random.seed(1), np.random.seed(2)
        output.sum().item()  # read early
    if step == 3:
        loss = (output @ output.T).tanh().mean()  # samples see each other: the call is made eagerly
    else:
        loss = F.cross_entropy(output, y)
    with torch.no_grad():
        seen = model(x).sum().item()
    return [*finish(loss, optimizer), *others, seen, np.random.rand(), random.random()]


def heard(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, D, generator=chance, dtype=torch.float64)
    labels = torch.randint(1, CLASSES, (8, 3), generator=chance)
    if step == 4:
        labels[5, 2] = -100  # one is shorter: the batch is not split
    return finish(model(x, labels), optimizer)


class Ctc(nn.Module):
    """The loss of speech recognition, with all targets in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.two(torch.tanh(self.one(x))).log_softmax(-1).transpose(0, 1)
        heard = torch.ones_like(x[..., 0], dtype=torch.long).sum(-1)
        mask = labels > 0
        return F.ctc_loss(scores, labels.masked_select(mask), heard, mask.sum(-1), reduction="mean")


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[Any]:
    x, y = batch(step, 4 if isinstance(model, Alone) else 8)  # in four micro-batches, or in two
    seen = finish(F.cross_entropy(model(x), y), optimizer)
    if isinstance(model, Careful) and step in (2, 3):
        x[5, 2] = float("inf")  # the whole batch is clamped then, not the part that this sample is in
        loss = F.cross_entropy(model(x * 3), y)
        loss.backward()
        seen += [loss.item(), model.head.weight.grad.sum().item()]
        optimizer.zero_grad()
    return seen


MODELS = {
    "alone": (Alone, classify, 2),
    "paired": (Paired, classify, 2),
    "careful": (Careful, classify, 4),
    "scaled": (Scaled, classify, 4),
    "spanned": (Spanned, drawn, 4),
    "ctc": (Ctc, heard, 4),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if at % 2 else pytest.mark.slow) for at, name in enumerate(MODELS)]
)
def test_trains_by_micro_batches(name: str, pool: WorkerPool) -> None:
    make, step, pieces = MODELS[name]
    torch.manual_seed(1)
    reference = make().double()
    model = copy.deepcopy(reference)
    program = Program(make, step)
    random.seed(3), np.random.seed(4)
    expected = train(reference, program)
    story = manage(model, pool, strict=name != "careful")  # a branch that goes another way fails in the worker
    random.seed(3), np.random.seed(4)
    found = train(model, program)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert name == "ctc" or f"with {pieces} micro-batches" in str(story.plan)
    assert story.steps.get("overlapped", 0) >= STEPS - 3, str(story)
