"""The inputs that carry samples are identified."""

from __future__ import annotations

import torch
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims


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
    assert find_batch_dims(Convolution(), (torch.randn(6, 4), torch.eye(6).to_sparse()), {}) is None
    found = find_batch_dims(Pooled(), (torch.randn(6, 4), torch.ones(5, 3).to_sparse()), {})
    assert found is not None
    assert found.dims == (0, None)


class Words(nn.Module):
    """Time first; of all steps the words are one after the other, those of all samples in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(11, 6), nn.GRU(6, 5, 2), nn.Linear(5, 11)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, state = self.rnn(self.table(x), state)
        return self.head(found).view(-1, 11), state


def test_rows_in_which_samples_take_turns() -> None:
    torch.manual_seed(0)
    found = find_batch_dims(Words(), (torch.randint(11, (7, 4)), torch.zeros(2, 4, 5)), {})
    assert found is not None
    assert (found.dims, found.size) == ((1, 1), 4)
