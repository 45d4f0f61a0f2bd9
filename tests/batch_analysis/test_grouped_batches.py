"""Concatenated batches, empty tensors, layers with borrowed weights, and configured functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import SIZES, N, split_equals
from tests.batch_analysis.test_model_losses import Body, batch, make, own

D, T = 6, 4

JOINED = {
    "behind": lambda m, x: torch.cat([x, 2 * x, x.tanh()], 0).square().mean(),
    "behind, and in groups again": lambda m, x: torch.cat([x, 2 * x]).view(2, -1, T, D).tanh().prod(0).sum(),
    "behind in another dimension": lambda m, x: torch.cat([x.transpose(0, 1), x.transpose(0, 1)], 1).tanh().mean(),
    "groups behind groups": lambda m, x: torch.cat([x.repeat(2, 1, 1), x]).square().mean(),
    "no entries": lambda m, x: torch.cat([x.view(-1, 1, T, D), x[..., :0].view(x.shape[0], 1, T, 0)], -1).tanh().sum(),
}
MIXED = {
    "behind, and pairs of neighbours": lambda m, x: torch.cat([x, 2 * x]).view(-1, 2, T, D).prod(1).sum(),
    "behind, and as one of samples": lambda m, x: torch.cat([x, 2 * x]).view(-1, 2 * T, D).softmax(1).square().sum(),
    "entries of samples behind rows": lambda m, x: torch.cat([x.reshape(-1, D), x[:, 0]]).cumsum(0).sum(),
    "a constant behind": lambda m, x: torch.cat([x, m.table[None]]).square().mean(),
}


@pytest.mark.parametrize("name", JOINED)
def test_batches_one_behind_another_are_groups(name):
    split_equals(Step(make(Body(JOINED[name])), (batch(T, D),), own), SIZES[1:3])


@pytest.mark.parametrize("name", MIXED)
def test_groups_taken_for_samples_are_refused(name):
    assert Step(make(Body(MIXED[name])), (batch(T, D),), own).reason


class Reading(nn.Module):
    """A head without a matrix of its own."""

    def __init__(self, way) -> None:
        super().__init__()
        self.bias, self.way = nn.Parameter(torch.zeros(5)), way

    def forward(self, x, table):
        return self.way(x, table.weight) + self.bias


class Lending(nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, D), Reading(way)

    def forward(self, x):
        return self.head(x, table=self.table).square().mean()


def test_a_layer_that_is_lent_the_weights_of_another():
    split_equals(Step(make(Lending(lambda x, w: x @ w.T)), (batch(T, D),), own), SIZES[1:3])
    assert Step(make(Lending(lambda x, w: (x - x.mean(0)) @ w.T)), (batch(T, D),), own).reason


class Scaled(torch.autograd.Function):
    """Its settings come in a dictionary."""

    @staticmethod
    def forward(ctx, x, settings):
        ctx.settings = settings
        return x * settings["by"] - (x.mean(0) if settings["centred"] else 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.settings["by"], None


@pytest.mark.parametrize("centred", [False, True])
def test_functions_with_settings_in_a_dictionary(centred):
    settings = {"by": 2.0, "centred": centred}
    step = Step(make(Body(lambda m, x: Scaled.apply(x, settings).square().mean())), (batch(T, D),), own)
    if centred:
        assert step.reason
    else:
        split_equals(step, SIZES[1:3])


class Cells(nn.Module):
    """Entries of every sample gathered by cells, in one row for all samples."""

    def __init__(self, way) -> None:
        super().__init__()
        self.fc, self.way = nn.Linear(D, D), way

    def forward(self, x, cells):
        offsets = torch.arange(start=0, end=x.shape[0]) * 5
        flat = torch.as_tensor(cells + offsets.unsqueeze(-1)).view(-1)
        return self.way(self.fc(x)[..., 0].reshape(-1), flat, x.shape[0]).square().mean()


CELLS = {
    "scattered": lambda x, c, n: torch.zeros(5 * n).to(x).scatter_reduce(0, c, x, "amax", include_self=False),
    "added": lambda x, c, n: torch.zeros(5 * n).to(x).scatter_add(0, c, x),
    "there and back": lambda x, c, n: torch.zeros(5 * n).to(x).scatter_add(0, c, x).gather(0, c).tanh(),
}
ELSEWHERE = {
    "in the cells of the next": lambda x, c, n: torch.zeros(5 * n).to(x).scatter_add(0, (c + 5) % (5 * n), x),
    "by what was computed": lambda x, c, n: x.gather(0, x.argsort().clamp(max=4)),
    "another's entries": lambda x, c, n: x.gather(0, c.flip(0) % (T * n)),
}


def cells():
    return torch.randint(0, 5, (N, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CELLS)
def test_entries_by_cells_of_their_sample(name):
    split_equals(Step(make(Cells(CELLS[name])), (batch(T, D), cells()), own), SIZES[1:3])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_entries_by_cells_of_others(name):
    step = Step(make(Cells(ELSEWHERE[name])), (batch(T, D), cells()), own)
    if not step.reason:
        with pytest.raises(SplittingError, match="rows of another"):
            split_equals(step, SIZES[1:3])
