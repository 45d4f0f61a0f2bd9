"""In-place writes to views of an output are visible in the output and its other views."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda whole: whole[0],
    "flat": lambda whole: whole.view(-1)[:3],
    "column": lambda whole: whole.t()[1],
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "method": lambda part: part.mul_(2.0),
    "item": lambda part: part.__setitem__(0, 3.0),
    "operator": lambda part: part.__iadd__(part.detach()),
    "inplace": lambda part: F.relu(part, inplace=True),
    "past autograd": lambda part: (part.data.add_(1.0), part.mul_(2.0)),
}


def train(
    model: nn.Module, view: Callable[..., Any], write: Callable[..., Any], reads: str, by_part: bool
) -> list[Any]:
    torch.manual_seed(1)
    seen = []
    for _ in range(4):
        whole = model(torch.randn(8, 8, dtype=torch.float64))
        part, other = view(whole), whole[:, :2]
        model.zero_grad()
        whole.pow(2).mean().backward(retain_graph=True)
        seen += [{"part": part, "whole": whole, "other": other}[name].sum().item() for name in reads.split()]
        write(part)
        loss = (other if by_part else whole).pow(2).sum()
        loss.backward()
        seen += [loss.item(), part.sum().item(), *(one.grad.clone() for one in model.parameters())]
    return seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reads", "by_part"),
    [("part", False), pytest.param("whole part", False, marks=pytest.mark.slow), ("part other", True)],
)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_know_of_it(view: str, write: str, reads: str, by_part: bool, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    expected = train(reference, VIEWS[view], WRITES[write], reads, by_part)
    manage(model, pool)
    for one, other in zip(train(model, VIEWS[view], WRITES[write], reads, by_part), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
