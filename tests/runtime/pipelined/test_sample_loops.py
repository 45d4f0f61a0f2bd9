"""Models whose Python loops over samples or packed images train as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.planner.microbatch_capture import prove_micro_batch
from gemini.planner.microbatch_split import find_batch_dims
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

WIDTH, HEADS = 12, 2
Batch = tuple[torch.Tensor, ...]


class Tower(nn.Module):
    """Patches of all pictures in one row; each sees those of its own picture, whose place it knows."""

    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(5, WIDTH), nn.Embedding(8, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 4)

    def forward(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        places = []
        for height, width in grids.tolist():
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            places.append(torch.stack([rows.flatten(), columns.flatten()], -1))
        ends = F.pad((grids[:, 0] * grids[:, 1]).cumsum(0), (1, 0))
        x = self.embed(patches) + self.places(torch.cat(places)).sum(1)
        for mix in self.mix:
            lengths = ends[1:] - ends[:-1]
            parts = [torch.split(one, lengths.tolist()) for one in mix(x).chunk(3, -1)]
            seen = [torch.softmax(q @ k.T, -1) @ v for q, k, v in zip(*parts, strict=True)]
            x = x + self.drop(torch.cat(seen))
        return self.head(x)


def batch(samples: int, grid: tuple[int, int] = (2, 3)) -> Batch:
    patches = torch.randn(samples * grid[0] * grid[1], 5, dtype=torch.float64)
    return patches, torch.tensor([grid] * samples)


def uneven() -> Batch:
    """As many patches and pictures as `batch(8)` has, of other sizes."""
    grids = torch.tensor([(2, 3)] * 6 + [(1, 2), (2, 5)])
    return torch.randn(48, 5, dtype=torch.float64), grids


def train(model: nn.Module, batches: list[Batch]) -> list[Any]:
    torch.manual_seed(3)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for given in batches:
        loss = model(*given).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), torch.rand(1)]
    return seen


def compare(model: nn.Module, batches: list[Batch], pool: WorkerPool) -> Any:
    model = model.double()
    reference = copy.deepcopy(model)
    expected, story = train(reference, batches), manage(model, pool)
    for one, other in zip(train(model, batches), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    return story


@pytest.mark.slow
def test_pictures_of_one_size_are_split(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    batches = [batch(8), batch(8), batch(8), uneven(), batch(8), batch(6), batch(6), batch(8, (3, 2)), batch(8)]
    story = compare(Tower(), batches, pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 4, str(story)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 1, str(story)


@pytest.mark.slow
def test_pictures_of_other_sizes_come_first(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    story = compare(Tower(1, 0.0), [uneven(), uneven(), uneven(), batch(8)], pool)
    assert story.steps == {"local": 1, "dispatched": 1, CallPath.SINGLE_MICROBATCH: 1, CallPath.OVERLAPPED: 1}, str(
        story
    )


class Guarded(Tower):
    """A mask decides a branch, and must do so in every micro-batch as on the whole batch."""

    def forward(self, patches: torch.Tensor, grids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = super().forward(patches, grids).unflatten(0, (len(grids), -1))
        return found * 2 if mask.any() else found


@pytest.mark.slow
def test_branches_of_the_whole_batch_hold_in_every_micro_batch(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    none, one = torch.zeros(8, 3, dtype=torch.bool), torch.zeros(8, 3, dtype=torch.bool)
    one[5, 1] = True
    story = compare(Guarded(1, 0.0), [(*batch(8), mask) for mask in (none, none, none, one, one, none, ~none)], pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


def test_evaluation_of_loops(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Tower(1, 0.0).double().eval()
    reference = copy.deepcopy(model)
    story = manage(model, pool)
    with torch.no_grad():
        for given in (batch(8), batch(8), batch(8), uneven(), batch(8)):
            torch.testing.assert_close(model(*given), reference(*given), rtol=1e-12, atol=1e-12)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


# ── what follows from roles ────────────────────────────────────────────────────────────────────────────────────────
class Between(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, self.first(x))


def reason_of(body: Any, samples: int = 4) -> str:
    """Why the batch is not split; '' if it is."""
    torch.manual_seed(0)
    model, given = Between(body).double(), (torch.randn(samples, 5, dtype=torch.float64),)
    plan = find_batch_dims(model, given, {})
    if plan is None:
        return "no samples"
    try:
        piece = prove_micro_batch(model, given, {}, plan, PlanRequest(2, samples, cache=False))
    except UnplannableError as error:
        return str(error)
    kinds = [piece.forms.kind(ref) for ref in piece.graph.outputs()]
    return next((kind.reason for kind in kinds if hasattr(kind, "reason")), "")


WHOLE = {
    "all samples, in the body": lambda m, x: m.last(torch.stack([one + x.mean(0) for one in x])),
    "some samples, in the body": lambda m, x: m.last(torch.stack([one + x[:1].sum(0) for one in x])),
    "their number, in the body": lambda m, x: m.last(torch.stack([one / x.shape[0] for one in x])),
    "the first for all": lambda m, x: m.last(x + torch.tanh(next(iter(x)))),
    "a list of outputs": lambda m, x: [m.last(one) for one in x],
    "a batch of batches": lambda m, x: m.last(torch.stack([x + one for one in x]).sum(0)),
    "entries of two batches": lambda m, x: m.last(torch.stack(list(torch.cat([x, 2 * x])))[: x.shape[0]]),
    "the largest of all": lambda m, x: m.last(x) * torch.stack([one.sum() for one in x]).max(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_bodies_that_see_more_than_a_sample_are_not_split(name: str) -> None:
    assert reason_of(WHOLE[name])


SPLIT = {
    "a sum a sample": lambda m, x: m.last(x) * torch.stack([one.sum() for one in x])[:, None],
    "a row and a column": lambda m, x: m.last(torch.cat([one[:, None] for one in x], 1).T),
    "positions of all": lambda m, x: m.last(x + torch.tensor([0.0, 1, 2, 3, 4] * len(x)).view(-1, 5)),
    "a mean of losses": lambda m, x: torch.stack([m.last(one).square().sum() for one in x]).mean(),
}


@pytest.mark.parametrize("name", SPLIT)
def test_loops_whose_bodies_see_a_sample_are_split(name: str) -> None:
    assert reason_of(SPLIT[name]) == ""


class Tables(nn.Module):
    """No children, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one * self.table for one in x])


def test_a_loop_in_a_module_without_children_is_split() -> None:
    tables = Tables().double()

    class Whole(Between):
        def __init__(self) -> None:
            super().__init__(None)
            self.tables = tables

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.tables(self.first(x)))

    model, given = Whole().double(), (torch.randn(4, 5, dtype=torch.float64),)
    plan = find_batch_dims(model, given, {})
    assert plan is not None
    assert prove_micro_batch(model, given, {}, plan, PlanRequest(2, 4, cache=False)).graph.rolled == 4


class Switched(Tower):
    """A buffer decides, beside the sizes of pictures."""

    def __init__(self) -> None:
        super().__init__(1, 0.0)
        self.register_buffer("least", torch.tensor(0))

    def forward(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        found = super().forward(patches, grids)
        return found * 3 if bool((grids.sum() > self.least).all()) else found


def test_a_buffer_that_decides_is_looked_at(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Switched().double()
    reference = copy.deepcopy(model)
    batches, story = [batch(8) for _ in range(4)], manage(model, pool)
    for least in (0, 10_000):
        with torch.no_grad():
            model.least.fill_(least)
            reference.least.fill_(least)
        for one, other in zip(train(model, batches), train(reference, batches), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=str(story))
