"""Sizes that depend on contents stay so where they are padded, joined or cut off: branches on them are checked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import capture


class Branches(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.last = change, nn.Linear(1, 2)

    def forward(self, x):
        kept = torch.unique(x)[None, :, None]
        if self.change(kept).shape[1] > 6:
            kept = kept * 2
        return self.last(kept.sum(1))


@pytest.mark.parametrize(
    "change",
    [lambda x: F.pad(x, (0, 0, 1, 0)), lambda x: torch.cat([x, x.new_zeros(1, 1, 1)], 1), lambda x: x[:, :-1]],
    ids=["padded", "joined", "cut_off"],
)
def test_a_branch_on_a_changed_dynamic_size_depends_on_contents(change):
    model = Branches(change)
    graph = capture(model, (torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]),))
    branches = [guard for guard in graph.guards if "gt(" in str(guard)]
    assert graph.is_whole or all(guard.data for guard in branches)
