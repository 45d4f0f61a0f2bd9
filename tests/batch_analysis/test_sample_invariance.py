"""Tensors that are equal for all samples, and masks with equal counts per sample, are recognized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import SIZES, split_equals
from tests.batch_analysis.test_model_losses import Body, batch, make, own

D, T = 6, 4


def token(m, x):
    """x with a token in front, and places added."""
    longer = torch.cat([m.table[:1].expand(x.shape[0], -1, -1), x], 1)
    return longer + m.fc.weight[None, : longer.shape[1]]


def windows(x):
    """Two windows of each sample, as samples of their own."""
    return x.reshape(x.shape[0] * 2, T // 2, D)


def masked(x, scores, keep=2, value=1.0):
    """The mean over what is masked: of each sample as many places, by the order of its scores."""
    mask = torch.ones(x.shape[0], T).to(x)
    mask[:, :keep] = 0
    mask = torch.gather(mask, dim=1, index=scores.argsort(1).argsort(1))
    return (x.square().mean(-1) * mask).sum() / mask.sum() * value


def buckets(x, repeats=2):
    """Rows of a table by places that all samples have; in another order than the rows they are for."""
    places = torch.arange(T).repeat(x.shape[0], 1)
    places = (places * 2 % D).unsqueeze(0).repeat(repeats, 1, 1).view(-1, 1)
    rows = torch.stack([x, 2 * x], 1).view(-1, D)
    return rows.gather(1, places).tanh()


EVEN = {
    "a token for every window": lambda m, x: torch.cat([token(m, x)[:, :1].repeat(2, 1, 1), windows(x)], 1).cos().sum(),
    "as many tokens as samples": lambda m, x: (token(m, windows(x))[: len(x), 0, :] * x[:, 0]).mean(),
    "places in another order": lambda m, x: buckets(x).square().mean(),
    "over as many as each has": lambda m, x: masked(x, x[..., 0]),
    "groups of samples": lambda m, x: torch.cat(
        torch.cat(x.split(2, dim=1), dim=0).tanh().split(x.shape[0], dim=0), dim=1
    ).prod(1).mean(),
}  # fmt: skip
UNEVEN = {
    "a sample's own for every window": lambda m, x: torch.cat([x[:, :1].repeat(2, 1, 1), windows(x)], 1).prod(1).sum(),
    "the places behind the token": lambda m, x: torch.cat(
        [token(m, x)[:, 1:2].repeat(2, 1, 1), windows(x)], 1
    ).prod(1).sum(),
    "the first windows": lambda m, x: (token(m, windows(x))[: len(x), 1, :] * x[:, 0]).mean(),
    "a token written to": lambda m, x: written_to(m, x) + 0,
    "places of samples": lambda m, x: torch.stack([x, 2 * x], 1).view(-1, D).gather(
        1, (x[..., 0] > 0).long().repeat(2, 1).view(-1, 1)
    ).square().mean(),
    "over what each has": lambda m, x: (x * (x > 0)).sum() / (x > 0).sum(),
    "some of an order": lambda m, x: part(x),
    "half of the samples": lambda m, x: x.split((x.shape[0] + 1) // 2, 0)[0].square().mean(),
}  # fmt: skip


def written_to(m, x):
    made = m.table[:1].expand(x.shape[0], -1, -1).contiguous()
    made[:, 0] = x[:, 0]
    return torch.cat([made.repeat(2, 1, 1), windows(x)], 1).prod(1).sum()


def part(x):
    mask = torch.ones(x.shape[0], T).to(x)
    mask[:, :2] = 0
    mask = mask.gather(1, x[..., 0].argsort(1).clamp(max=1))
    return (x.square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("name", EVEN)
def test_what_is_the_same_for_all_samples(name):
    split_equals(Step(make(Body(EVEN[name])), (batch(T, D),), own), SIZES[1:3])


@pytest.mark.parametrize("name", UNEVEN)
def test_what_differs_from_sample_to_sample(name):
    assert Step(make(Body(UNEVEN[name])), (batch(T, D),), own).reason


class Drawn(nn.Module):
    """Drops of a token: not the same for all samples any more."""

    def __init__(self, probability) -> None:
        super().__init__()
        self.table, self.drop = nn.Parameter(torch.randn(1, D)), nn.Dropout(probability)

    def forward(self, x):
        tokens = self.drop(self.table.expand(x.shape[0], 1, D))
        return torch.cat([tokens.repeat(2, 1, 1), windows(x)], 1).prod(1).sum()


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_drops_are_of_every_sample(probability):
    step = Step(make(Drawn(probability)), (batch(T, D),), own)
    assert bool(step.reason) == bool(probability)
