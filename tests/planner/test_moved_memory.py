"""A forward that gives a parameter other memory is not planned, and planning leaves all memory as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.planner.planning import Wish, plan_step
from gemini.planner.step_plan import UnplannableError


class Momentum(nn.Module):
    """Its keys follow its queries, as in momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            keys = self.key(x)
        return (self.query(x) * keys).sum(1)


def test_it_is_not_planned() -> None:
    model = Momentum()
    before = {name: (one.data_ptr(), one.clone()) for name, one in model.named_parameters()}
    with pytest.raises(UnplannableError, match=r"its forward gives key\.bias other memory"):
        plan_step(model, (torch.randn(8, 6),), {}, Wish(workers=2, micro_batches=2))
    for name, one in model.named_parameters():
        assert one.data_ptr() == before[name][0]
        assert torch.equal(one, before[name][1])
