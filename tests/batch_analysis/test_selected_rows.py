"""Rows selected by a mask split where each is processed independently and scattered back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import SIZES, split_equals
from tests.batch_analysis.test_model_losses import batch, make, own

D, T = 6, 4


class Picking(nn.Module):
    """Some rows of x (n·t, d), as many as there are, go a way of their own."""

    def __init__(self, way) -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(D, D), nn.Linear(D, D), way
        self.table = nn.Parameter(torch.randn(T, D))

    def forward(self, x):
        return self.way(self, self.one(x).flatten(0, 1)).square().mean()


def row(x):
    return torch.where(x[:, 0] > 0)[0]


def filled(x, index, value):
    made = x.clone()
    made[index] = value
    return made


APART = {
    "added": lambda m, x: added(x, m.two),
    "a number": lambda m, x: filled(x.tanh(), torch.where(x[:, 0] > 0), 2.0),
    "a number for entries": lambda m, x: filled(x.tanh(), torch.where(x > 0.2), 2.0),
    "by the place in another dimension": lambda m, x: placed(m, x) + 0,
    "nonzero": lambda m, x: filled(x.tanh(), (x > 0.2).nonzero(as_tuple=True), 0.0),
}
MIXED = {
    "softmax over the chosen": lambda m, x: added(x, lambda rows: rows.softmax(0)),
    "the next one's": lambda m, x: added(x, lambda rows: rows.roll(1, 0)),
    "over how many": lambda m, x: added(x, lambda rows: rows / rows.shape[0]),
    "the mean of the chosen": lambda m, x: x + added(x, lambda rows: rows.mean(0).expand_as(rows)),
    "places of other rows": lambda m, x: x.index_add(0, row(x).flip(0), x[row(x)]),
    "chosen twice": lambda m, x: x.index_add(0, row(x), x[row(x)]),
    "places of another tensor": lambda m, x: filled(x.tanh(), torch.where(x.view(-1, T, D)[:, 0, 0] > 0), 2.0),
    "places as numbers": lambda m, x: added(x, lambda rows: rows * row(x)[:, None]),
    "rows of a table": lambda m, x: x.mean() + m.table[row(x) % T],
    "only the chosen": lambda m, x: x[row(x)],
    "any": lambda m, x: added(x, m.two) if len(row(x)) else x,
}


def added(x, change):
    index = row(x)
    return x.index_add(0, index, change(x[index]))


def placed(m, x):
    rows, columns = torch.where(x > 0.3)
    return x.index_add(0, rows, m.two(x[rows]) * x[rows, columns, None] * m.table[0][columns][:, None])


@pytest.mark.parametrize("name", APART)
def test_chosen_rows_that_go_back_to_their_places(name):
    split_equals(Step(make(Picking(APART[name])), (batch(T, D),), own), SIZES[1:3])


@pytest.mark.parametrize("name", MIXED)
def test_chosen_rows_that_see_each_other_are_refused(name):
    assert Step(make(Picking(MIXED[name])), (batch(T, D),), own).reason
