"""Mixtures of experts split: rows sorted by expert, processed per group, and scattered back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import N
from tests.batch_analysis.test_model_losses import own

D, E, K, T = 8, 4, 2, 3


class Experts(nn.Module):
    """As in transformers; `twist` does something to sorted keys and rows."""

    def __init__(self, twist) -> None:
        super().__init__()
        self.router, self.twist = nn.Linear(D, E), twist
        self.up = nn.Parameter(torch.randn(E, D, D) * 0.3)
        self.bias = nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(K)
        keys, order = torch.sort(chosen.reshape(-1))
        rows, scales = flat[order // K], weights.reshape(-1)[order]
        counts = torch.histc(keys.float(), bins=E, min=0, max=E - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = self.twist(keys, rows)
        out = torch._grouped_mm(rows, self.up, offs=offsets) + self.bias[keys]
        out = out * scales[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return out[back].view(flat.shape[0], K, -1).sum(1).view(x.shape).square().mean()


def clamped(keys, rows):
    sentinel = (keys >= E).unsqueeze(-1)
    keys.clamp_(max=E - 1)
    rows.masked_fill_(sentinel, 0.0)
    return rows


def same_type(keys, rows):
    other = keys.to(torch.int64)
    keys.remainder_(2)
    return rows * torch.histc(other.float(), bins=E, min=0, max=E - 1).sum()


def step(twist):
    torch.manual_seed(0)
    return Step(Experts(twist), (torch.randn(N, T, D),), own)


@pytest.mark.parametrize("twist", [lambda keys, rows: rows, clamped], ids=["plain", "clamped"])
def test_rows_of_experts_split(twist):
    made = step(twist)
    assert made.reason == ""
    loss, grads = made.whole()
    grads = [grad.clone() for grad in grads]
    for sizes in ([3, 2, 2], [1] * N):
        again, others = made.split(sizes)
        assert torch.allclose(loss, again, rtol=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(grads, others, strict=True))


MIXED = {
    "summed rows": lambda keys, rows: rows + rows.sum(0),
    "next row": lambda keys, rows: rows.roll(1, 0),
    "first row": lambda keys, rows: rows - rows[:1],
    "cumulative": lambda keys, rows: rows.cumsum(0),
    "keys written under another name": same_type,
    "number of rows": lambda keys, rows: rows / rows.shape[0],
    "capacity": lambda keys, rows: rows * (torch.arange(rows.shape[0]) < 9)[:, None],
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_see_each_other_do_not(name):
    assert step(MIXED[name]).reason
