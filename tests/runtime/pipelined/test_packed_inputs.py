"""Packed inputs with several rows per sample train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

WIDTH, WORDS, LENGTH = 12, 20, 5
Batch = tuple[torch.Tensor, ...]


def batch(samples: int, rows: int = 3) -> Batch:
    """Rows of all samples, and words of each."""
    x = torch.randn(samples * rows, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(WORDS, (samples, LENGTH))


class Packed(nn.Module):
    """Rows are worked on together, then seen by the words of their sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2))
        self.words = nn.Embedding(WORDS, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(x)
        hidden = torch.cat([rows.view(ids.shape[0], -1, 16), self.words(ids)], 1)
        return self.head(self.mix(hidden)[:, -LENGTH:]), rows


class Seeing(Packed):
    """Rows of all samples see each other."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(x)
        rows = F.softmax(rows @ rows.T, -1) @ rows
        hidden = torch.cat([rows.view(ids.shape[0], -1, 16), self.words(ids)], 1)
        return self.head(self.mix(hidden)[:, -LENGTH:]), rows


class Shifted(Packed):
    """Every row but the first meets the one before, which may be another sample's."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, rows = super().forward(x, ids)
        return logits, rows + 0.1 * rows.roll(1, 0)


def loss_of(found: Any, given: Batch) -> torch.Tensor:
    logits, rows = found
    return F.cross_entropy(logits.flatten(0, 1), given[1].flatten()) + rows.square().mean()


def train(model: nn.Module, batches: Sequence[Batch], loss: Callable[..., torch.Tensor] = loss_of) -> list[Any]:
    torch.manual_seed(3)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for given in batches:
        given = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in given)
        found = loss(model(*given), given)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        seen += [found.detach(), *(one.grad for one in given if one.requires_grad), torch.rand(1)]
    return seen


def compare(model: nn.Module, batches: Sequence[Batch], pool: WorkerPool) -> Any:
    torch.manual_seed(1)
    model = model.double()
    reference = copy.deepcopy(model)
    expected = train(reference, batches)
    story = manage(model, pool)
    for one, other in zip(train(model, batches), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    return story


def test_rows_of_samples_go_with_them(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    found = find_batch_dims(Packed().double(), batch(6), {})
    assert found is not None
    assert (found.dims, found.factors, found.size) == ((0, 0), (3, 1), 6)
    sizes = ((8, 3), (8, 3), (8, 3), (5, 3), (5, 3), (6, 2), (6, 2), (6, 2), (8, 3))
    story = compare(Packed(), [batch(*size) for size in sizes], pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 4, str(story)
    assert CallPath.SINGLE_MICROBATCH not in story.steps, str(story)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Seeing, Shifted])
def test_rows_that_see_those_of_other_samples_stay_together(make: type[nn.Module], pool: WorkerPool) -> None:
    torch.manual_seed(0)
    story = compare(make(), [batch(8) for _ in range(4)], pool)
    assert CallPath.OVERLAPPED not in story.steps or "whole batch" in story.plan, str(story)


@pytest.mark.slow
def test_evaluation(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = Packed().double()
    reference = copy.deepcopy(model)
    story, seen = manage(model, pool), []
    batches = [batch(8) for _ in range(4)]
    for one in (reference, model):
        torch.manual_seed(2)
        with torch.no_grad():
            seen.append([one(*given) for given in batches])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


class Pictures(nn.Module):
    """Two pictures a sample, of four patches each; their sizes are looked at, not read."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.sizes = nn.Linear(WIDTH, 16), nn.Linear(2, 16)
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pictures = self.patches(x).view(sizes.shape[0], -1, 16).mean(1) + self.sizes(sizes)
        seen = pictures.view(ids.shape[0], -1, 16).sum(1, keepdim=True)
        return self.head(torch.tanh(self.words(ids) + seen)), pictures


def test_several_pictures_a_sample(pool: WorkerPool) -> None:
    torch.manual_seed(0)

    def given(samples: int) -> Batch:
        x = torch.randn(samples * 8, WIDTH, dtype=torch.float64)
        return x, torch.rand(samples * 2, 2, dtype=torch.float64), torch.randint(WORDS, (samples, LENGTH))

    found = find_batch_dims(Pictures().double(), given(6), {})
    assert found is not None
    assert (found.factors, found.size) == ((8, 2, 1), 6)
    torch.manual_seed(1)
    model = Pictures().double()
    reference = copy.deepcopy(model)
    batches = [given(8) for _ in range(4)]

    def loss(found: Any, given: Batch) -> torch.Tensor:
        return loss_of(found, (given[0], given[2]))

    expected, story = train(reference, batches, loss), manage(model, pool)
    for one, other in zip(train(model, batches, loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


def positions(grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every patch, picture by picture."""
    found = []
    for height, width in grid.tolist():
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        found.append(torch.stack([rows.flatten(), columns.flatten()], -1))
    joined = torch.cat(found)
    return joined[:, 0], joined[:, 1]


def numbered(grid: torch.Tensor) -> torch.Tensor:
    """How far every patch is from the first of its picture."""
    counts = grid.prod(-1)
    starts = torch.repeat_interleave(F.pad(counts.cumsum(0)[:-1], (1, 0)), counts)
    return torch.arange(counts.sum()) - starts


class Grids(nn.Module):
    """Positions of patches by the sizes of their pictures, which Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WORDS)
        self.rows, self.columns, self.numbers = (nn.Embedding(count, 16) for count in (8, 8, 64))

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        rows, columns = positions(grid)
        seen = self.patches(x) + self.rows(rows) + self.columns(columns) * self.numbers(numbered(grid))
        return self.head(torch.tanh(seen))


@pytest.mark.slow
def test_functions_that_read_sizes_of_pictures_run_for_the_whole_batch(pool: WorkerPool) -> None:
    torch.manual_seed(0)

    def given(*sizes: tuple[int, int]) -> Batch:
        grid = torch.tensor(sizes)
        return torch.randn(int(grid.prod(-1).sum()), WIDTH, dtype=torch.float64), grid

    batches = [given(*[(2, 3)] * 8) for _ in range(4)]
    batches.append(given(*[(3, 2)] * 8))  # as many patches, elsewhere
    batches.append(given(*[(1, 6), (6, 1)] * 4))
    batches.append(given(*[(1, 4), (2, 4)] * 4))  # as many in all, not in each
    batches += [given(*[(2, 2)] * 8) for _ in range(3)]
    torch.manual_seed(1)
    model = Grids().double()
    reference = copy.deepcopy(model)

    def loss(found: Any, given: Batch) -> torch.Tensor:
        return found.square().mean()

    expected, story = train(reference, batches, loss), manage(model, pool)
    for one, other in zip(train(model, batches, loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 4, str(story)


def halves(grid: torch.Tensor) -> torch.Tensor:
    """The patches in even columns of every picture, then those in odd ones."""
    found, before = [], 0
    for height, width in grid.tolist():
        numbers = torch.arange(height * width).reshape(height, width)
        found.append(torch.cat([numbers[:, ::2].flatten(), numbers[:, 1::2].flatten()]) + before)
        before += height * width
    return torch.cat(found)


class Sorted(nn.Module):
    """Patches in another order, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        order = halves(grid)
        seen = self.patches(x)[order, :]
        half = seen.view(grid.shape[0], 2, -1, 16)
        mixed = torch.tanh(half[:, 0] + half[:, 1])
        back = torch.argsort(order)
        return self.head(torch.cat([mixed, mixed], 1).view(-1, 16)[back])


class Crossed(Sorted):
    """The same, of all pictures together."""

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return super().forward(x[halves(grid).flip(0)], grid)


@pytest.mark.parametrize("make", [Sorted, Crossed])
def test_rows_in_an_order_of_their_sample(make: type[nn.Module], pool: WorkerPool) -> None:
    torch.manual_seed(0)
    grid = torch.tensor([(2, 4)] * 8)
    batches = [(torch.randn(64, WIDTH, dtype=torch.float64), grid) for _ in range(4)]
    torch.manual_seed(1)
    model = make().double()
    reference = copy.deepcopy(model)

    def loss(found: Any, given: Batch) -> torch.Tensor:
        return found.square().mean()

    expected, story = train(reference, batches, loss), manage(model, pool)
    for one, other in zip(train(model, batches, loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    in_pieces = story.steps.get(CallPath.OVERLAPPED, 0) >= 2 and "whole batch" not in story.plan
    assert in_pieces == (make is Sorted), str(story)


def windows(grid: torch.Tensor) -> torch.Tensor:
    """Where the rows of every picture begin, and where the last ends."""
    found = [0]
    for height, width in grid.tolist():
        found += [found[-1] + width * (row + 1) for row in range(height)]
    return torch.tensor(found)


class Attending(Sorted):
    """Patches see those of their row of their picture."""

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        seen, bounds = self.patches(x)[halves(grid)], windows(grid)
        lengths = bounds[1:] - bounds[:-1]
        rows = [F.softmax(one @ one.T, -1) @ one for one in seen.split(lengths.tolist())]
        return self.head(torch.cat(rows))


@pytest.mark.slow
def test_loops_over_what_a_function_reads(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    grids = [[(2, 4)] * 8] * 4 + [[(4, 2)] * 8] * 3 + [[(2, 4), (4, 2)] * 4]
    batches = [(torch.randn(64, WIDTH, dtype=torch.float64), torch.tensor(grid)) for grid in grids]
    torch.manual_seed(1)
    model = Attending().double()
    reference = copy.deepcopy(model)

    def loss(found: Any, given: Batch) -> torch.Tensor:
        return found.square().mean()

    expected, story = train(reference, batches, loss), manage(model, pool)
    for one, other in zip(train(model, batches, loss), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)
