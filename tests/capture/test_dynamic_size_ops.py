"""Padding, joining and slicing keep a size data-dependent, so branches on it are guarded."""

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


class Distinct(nn.Module):
    def forward(self, x):
        return torch.unique(x)[None]


class BranchesOnALeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf, self.last = Distinct(), nn.Linear(1, 2)

    def forward(self, x):
        kept = self.leaf(x)
        if kept.shape[1] > 6:
            kept = kept * 2
        return self.last(kept.sum(1, keepdim=True))


def test_a_leaf_in_which_contents_decide_sizes_has_results_of_such_sizes():
    graph = capture(BranchesOnALeaf(), (torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]),))
    branches = [guard for guard in graph.guards if "gt(" in str(guard)]
    assert graph.is_whole or all(guard.data for guard in branches)
