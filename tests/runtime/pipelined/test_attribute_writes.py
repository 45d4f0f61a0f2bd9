"""Attributes that a call writes, and arguments that it returns, are as in one process."""

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

STEPS = 6
Step = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, list[Any]]]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"one": nn.Linear(9, 12), "two": nn.Linear(12, 12), "three": nn.Linear(12, CLASSES)})
        self.kept: Any = None

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.dropout(torch.tanh(self.inner["one"](x)), 0.1, self.training)
        return torch.tanh(self.inner["two"](h))


class OfInputs(Base):
    """Something that follows from the inputs, as positions of pictures do, and its size."""

    def forward(self, x: torch.Tensor) -> Any:
        self.kept, self.size = (x > 0).sum(1, keepdim=True), x.shape[0]
        return self.inner["three"](self.body(x))


class Computed(Base):
    """Something that the model has computed, with its history."""

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = self.body(x)
        return self.inner["three"](self.kept)


class OfWeights(Base):
    """The same for all samples, and another one after every step."""

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = self.inner["two"].weight.detach().abs().sum(0)
        return self.inner["three"](self.body(x))


class Normed(Computed):
    """A batch that may not be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().body(x))


class Averaged(Base):
    """A mean over samples."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        self.kept = h.mean(0)
        return self.inner["three"](h)


class OwnLoss(Base):
    """Its loss, which the program takes from there; labels are the signs of the inputs, and some do not count."""

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner["three"](self.body(x))
        labels = torch.where(x[:, 2] > 1, -1, (x[:, :2] > 0).sum(1))
        self.kept = F.cross_entropy(found, labels, ignore_index=-1)
        return found


class Spread(Base):
    """A number that no sum over micro-batches gives."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        self.kept = h.detach().std(0)
        return self.inner["three"](h)


class Carried(Base):
    """The next call reads it."""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        if self.kept is not None:
            h = h + 0.1 * self.kept
        self.kept = h.detach().mean(0)
        return self.inner["three"](h)


def plain(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    return F.cross_entropy(model(x), y), []


def read_at_once(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    found = model(x)
    return F.cross_entropy(found, y), [model.kept.detach().clone()]


def in_the_loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    found = model(x)
    return F.cross_entropy(found, y) + 0.1 * model.kept.square().mean(), []


def own(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    model(x)
    return model.kept / 2, []


def compared(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    found = model(x)
    return F.cross_entropy(found @ found.T, y % len(y)) + model.kept.square().mean(), []


def train(model: Any, step: Step) -> list[Any]:
    torch.manual_seed(5)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(STEPS):
        x, y = batch(number, 8 if number % 3 else 6)
        loss, more = step(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *more]
        if number % 2:  # another reads it in the next step, or never
            seen.append(model.kept.detach().clone())
        seen.append(getattr(model, "size", 0))
    model.eval()
    with torch.no_grad():
        for number in range(3):
            seen += [model(batch(number)[0]), model.kept.detach().clone()]
    return [*seen, torch.get_rng_state(), *model.state_dict().values()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "step", "path"),
    [
        (OfInputs, plain, CallPath.OVERLAPPED),
        pytest.param(OfInputs, read_at_once, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        (Computed, plain, CallPath.OVERLAPPED),
        pytest.param(Computed, in_the_loss, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        (OfWeights, plain, CallPath.OVERLAPPED),
        (Normed, plain, CallPath.SINGLE_MICROBATCH),
        pytest.param(Normed, in_the_loss, CallPath.SINGLE_MICROBATCH, marks=pytest.mark.slow),
        (Averaged, plain, CallPath.OVERLAPPED),
        pytest.param(Averaged, read_at_once, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        pytest.param(Averaged, in_the_loss, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        pytest.param(Averaged, compared, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        (OwnLoss, plain, CallPath.OVERLAPPED),
        pytest.param(OwnLoss, compared, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        pytest.param(OwnLoss, own, CallPath.OVERLAPPED, marks=pytest.mark.slow),
        (Spread, plain, CallPath.SINGLE_MICROBATCH),
        (Carried, plain, CallPath.EAGER),
    ],
)
def test_attributes_are_what_one_process_leaves(make: type[nn.Module], step: Step, path: str, pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = make().double()
    reference = copy.deepcopy(model)
    expected = train(reference, step)
    story = manage(model, pool)
    found = train(model, step)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        else:
            assert one == other
    wanted = step is not read_at_once  # what is read before there is a loss has to be had at once
    assert not wanted or story.steps.get(path, 0) >= 2, str(story)
    assert not {CallPath.OVERLAPPED, CallPath.SINGLE_MICROBATCH}.intersection(story.steps) or path != CallPath.EAGER, (
        str(story)
    )


class Returning(Base):
    """Returns an argument, a parameter and a part of a container, as they are."""

    def forward(self, x: torch.Tensor, others: dict[str, torch.Tensor]) -> Any:
        logits = self.inner["three"](self.body(x)) * others["mask"]
        return {"logits": logits, "x": x, "weight": self.inner["two"].weight, "mask": others["mask"]}


@pytest.mark.parametrize("training", [True, False])
def test_arguments_and_parameters_are_returned_as_they_are(training: bool, pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Returning().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, pool), []
    for one in (reference, model):
        torch.manual_seed(3)
        seen.append([])
        for number in range(5):
            x, y = batch(number)
            x.requires_grad_(number % 2 == 0)
            mask = torch.rand(8, 1, dtype=torch.float64).expand(8, CLASSES)
            with torch.set_grad_enabled(training):
                found = one(x, {"mask": mask})
                assert found["x"] is x
                assert found["mask"] is mask
                assert found["weight"] is one.inner["two"].weight
                loss = F.cross_entropy(found["logits"], y) + found["weight"].square().sum() + found["x"].mean()
            if training:
                one.zero_grad()
                loss.backward()
            seen[-1] += [loss.detach(), x.grad, *(p.grad.clone() for p in one.parameters() if p.grad is not None)]
    for mine, other in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


class Recurrent(nn.Module):
    """Returns a state without history, for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.new, self.old, self.head = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, CLASSES)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        state = torch.tanh(self.new(x) + self.old(state))
        return self.head(state), state.detach()


def test_a_result_without_history_may_be_given_to_a_later_step(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Recurrent().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, pool), []
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        state = torch.zeros(8, 9, dtype=torch.float64)
        for number in range(5):
            x, y = batch(number)
            found, state = one(x, state)
            loss = F.cross_entropy(found, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert seen[5:] == pytest.approx(seen[:5], rel=1e-10)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)
