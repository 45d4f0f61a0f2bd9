"""Which inputs count samples."""

from __future__ import annotations

import torch
from torch import nn

from gemini.planner.samples import find_samples


class Convolution(nn.Module):
    """One layer over a whole graph: nodes see their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(neighbours, self.fc(x))


class Pooled(nn.Module):
    """A sparse table that is the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(table, self.fc(x).T).T


def test_a_sparse_tensor_is_not_cut() -> None:
    assert find_samples(Convolution(), (torch.randn(6, 4), torch.eye(6).to_sparse()), {}) is None
    found = find_samples(Pooled(), (torch.randn(6, 4), torch.ones(5, 3).to_sparse()), {})
    assert found is not None
    assert found.dims == (0, None)
