"""Python loops over experts split where an expert without rows contributes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import SIZES, split_equals
from tests.batch_analysis.test_model_losses import batch, make, own

D, T, E, K = 6, 3, 4, 2


def added(m, out, x, weights, e, slot, row):  # noqa: PLR0917
    return out.index_add_(0, row, m.experts[e](x[row]) * weights[row, slot, None])


def hot(chosen):
    return F.one_hot(chosen, E).permute(2, 1, 0)


class Mixture(nn.Module):
    """A layer, and experts that have some rows each."""

    def __init__(self, experts) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(D, D), experts

    def forward(self, x):
        return self.experts(torch.tanh(self.first(x)).view(-1, D)).square().mean()


class Listed(nn.Module):
    """As in transformers: goes through the experts that have rows; `turn` is one turn."""

    def __init__(self, turn=added, mask=hot, total=lambda mask: mask.sum((-1, -2))) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.bias = nn.Parameter(torch.randn(E, D))
        self.turn, self.mask, self.total = turn, mask, total

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = self.mask(chosen)
            hit = torch.greater(self.total(mask), 0).nonzero()
        for expert in hit:
            slot, row = torch.where(mask[expert[0]])
            out = self.turn(self, out, x, weights, expert[0], slot, row)
        return out


class Numbered(Listed):
    """Experts by their numbers, and a class for rows without one."""

    count = False

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, -1)
        out, count, mask = torch.zeros_like(x), 0, F.one_hot(chosen, E + 1).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero():
            number = int(expert.item())
            slot, row = torch.where(mask[number])
            if row.numel() == 0:
                continue
            out = self.turn(self, out, x, weights, number, slot, row)
            count += self.count
        return out / count if self.count else out


class Counted(Numbered):
    count = True


class Static(Listed):
    """All experts in turn."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for index, _ in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            if self.skips(row):
                out = self.without(out)
                continue
            out = self.turn(self, out, x, weights, index, slot, row)
        return out

    def skips(self, row):
        return row.numel() == 0

    def without(self, out):
        return out


class Few(Static):
    def skips(self, row):
        return row.numel() < 3


class Noted(Static):
    def without(self, out):
        return out + self.bias[0]


def everywhere(m, out, x, w, e, slot, row):  # noqa: PLR0917
    return added(m, out, x, w, e, slot, row).add_(m.bias[e])


APART = {
    "listed": Listed,
    "numbered": Numbered,
    "in turn": Static,
    "results of functions": lambda: Static(lambda m, o, x, w, e, s, r: o.index_add(0, r, m.experts[e](x[r]))),
    "the expert's own": lambda: Listed(lambda m, o, x, w, e, s, r: o.index_add_(0, r, x[r] * m.bias[e])),
    "a mask": lambda: Listed(mask=lambda c: hot(c).bool(), total=lambda mask: mask.sum((1, 2))),
}
MIXED = {
    "over how many experts": Counted,
    "to all rows": lambda: Listed(everywhere),
    "a mean of the rows": lambda: Listed(lambda m, o, x, w, e, s, r: o.index_add_(0, r, x[r] - x[r].mean(0))),
    "over how many rows": lambda: Listed(lambda m, o, x, w, e, s, r: o.index_add_(0, r, x[r] / len(r))),
    "over how many rows, read otherwise": lambda: Static(
        lambda m, o, x, w, e, s, r: o.index_add_(0, r, m.experts[e](x[r]) / r.shape[0])
    ),
    "rows of others": lambda: Listed(lambda m, o, x, w, e, s, r: o.index_add_(0, r, m.experts[e](x[r.flip(0)]))),
    "draws": lambda: Listed(lambda m, o, x, w, e, s, r: o.index_add_(0, r, F.dropout(x[r], 0.5))),
    "rows that may cancel out": lambda: Listed(mask=lambda c: hot(c) * torch.tensor([1, -1])[:, None]),
    "a list by some of the rows": lambda: Listed(total=lambda mask: mask[:, 0].sum(-1)),
    "a list by all but one": lambda: Listed(total=lambda mask: mask.sum((-1, -2)) - 1),
    "the empty add something": Noted,
    "few rows are none": Few,
}


@pytest.mark.parametrize("name", APART)
def test_experts_on_the_rows_they_have(name):
    split_equals(Step(make(Mixture(APART[name]())), (batch(T, D),), own), SIZES[1:3])


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_see_how_others_are_routed_are_refused(name):
    reason = Step(make(Mixture(MIXED[name]())), (batch(T, D),), own).reason
    assert reason.startswith("experts ("), reason
