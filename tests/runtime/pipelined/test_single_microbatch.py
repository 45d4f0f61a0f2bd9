"""Batches that cannot be split train in workers as a single micro-batch, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

Loss = Callable[[torch.Tensor], torch.Tensor]


class Normed(nn.Module):
    """Convolutions, statistics over the batch, dropout, part of it run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.first = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = checkpoint(self.first, x, use_reentrant=False) if self.training else self.first(x)
        return self.head(self.second(x).mean((2, 3)))


class Encoder(nn.Module):
    """Samples are independent; its loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(108, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(self.layers(x.flatten(1))), dim=1)


class Permuted(nn.Module):
    """Draws random numbers that depend on the batch as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        return self.second(hidden + 0.5 * hidden[torch.randperm(len(x))])


def square(found: torch.Tensor) -> torch.Tensor:
    return found.square().mean()


def train(model: nn.Module, loss: Loss, sizes: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(3)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number, size in enumerate(sizes):
        x = torch.randn(size, 3, 6, 6, dtype=torch.float64, requires_grad=number % 2 == 0)
        found = loss(model(x))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        seen += [found.detach(), x.grad, torch.rand(1)]
    return seen


def compare(model: nn.Module, loss: Loss, sizes: tuple[int, ...], pool: WorkerPool) -> Any:
    torch.manual_seed(1)
    model = model.double()
    reference = copy.deepcopy(model)
    expected = train(reference, loss, sizes)
    story = manage(model, pool)
    for one, other in zip(train(model, loss, sizes), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return story


@pytest.mark.parametrize(("make", "loss"), [(Normed, square), (Permuted, square)])
def test_trains_as_one_process(make: type[nn.Module], loss: Loss, pool: WorkerPool) -> None:
    story = compare(make(), loss, (8, 8, 8, 8, 5, 5, 8, 5), pool)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 3, str(story)
    assert CallPath.OVERLAPPED not in story.steps, str(story)


def test_single_samples_do_not_keep_batches_whole(pool: WorkerPool) -> None:
    story = compare(Encoder(), square, (1, 1, 1, 8, 8, 8, 1, 8), pool)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 1, str(story)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 1, str(story)


class Summed(nn.Module):
    """Adds its samples up before most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(108, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.flatten(1).sum(0, keepdim=True)).relu())


def test_one_line_says_why(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    model = Summed().double()
    story = manage(model, pool)
    managed = dispatch.find_managed(model)
    assert managed is not None
    managed.record.quiet = False
    train(model, square, (8,) * 4)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 1, str(story)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "a batch as a single micro-batch" in line]
    assert "of a sum over the batch" in line


def test_evaluation_of_a_batch_that_may_not_be_split(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Permuted().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, pool), []
    for one in (reference, model):
        torch.manual_seed(2)
        with torch.no_grad():
            seen.append([one(torch.randn(8, 3, 6, 6, dtype=torch.float64)) for _ in range(4)])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 2, str(story)


class Remembering(nn.Module):
    """Reads what an earlier call has left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(108, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.seen: Any = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.flatten(1))) + self.seen
        self.seen = hidden.detach().mean(0)
        return self.second(hidden)


class Deciding(nn.Module):
    """Branches on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(108, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x.flatten(1)))
        return self.second(hidden if hidden.abs().max() > 2 else 2 * hidden)


@pytest.mark.parametrize("make", [Remembering, Deciding])
def test_what_would_stay_in_a_worker_or_cannot_be_foreseen_is_not_planned(make: type[nn.Module]) -> None:
    with pytest.raises(UnplannableError, match="batch normalization"):
        plan_step(make(), (torch.randn(8, 3, 6, 6),), {}, PlanRequest(2, 4, cache=False))


def test_a_schedule_for_many_micro_batches_does_not_stand_in_the_way(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Normed().double()
    story = manage(model, pool, schedule="interleaved_1f1b")
    for _ in range(4):
        square(model(torch.randn(8, 3, 6, 6, dtype=torch.float64))).backward()
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 2, str(story)
    assert story.steps.get(CallPath.EAGER, 0) <= 2, str(story)


class Asking(nn.Module):
    """Branches on its inputs, by the size of something that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(108, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x.flatten(1))))
        wanted = (x[:, 0, 0, 0] > 100).sum() * hidden.shape[-1]
        if not torch.all(wanted.expand(hidden.shape[0]) == 0):
            hidden = 2 * hidden
        return self.second(hidden)


def test_a_branch_on_contents_that_goes_another_way_is_no_failure(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Asking().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, pool), []
    for one in (reference, model):
        torch.manual_seed(3)
        for number in range(6):
            x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
            x[0, 0, 0, 0] = 200.0 if number == 4 else 0.0
            one.zero_grad()
            loss = square(one(x))
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in one.parameters())]
    for mine, other in zip(seen[len(seen) // 2 :], seen, strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 3, str(story)


class Dropping(nn.Module):
    """Statistics over the batch, and layers that are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(108, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.dropout(self.norm(self.first(x.flatten(1))), 0.2, self.training)
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                hidden = torch.dropout(torch.tanh(layer(hidden)), 0.2, self.training)
        return self.second(hidden)


def test_layers_left_out_at_random_in_a_batch_that_may_not_be_split(pool: WorkerPool) -> None:
    story = compare(Dropping(), square, (8, 8, 8, 8, 8, 8, 8), pool)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 3, str(story)
    assert CallPath.OVERLAPPED not in story.steps, str(story)
