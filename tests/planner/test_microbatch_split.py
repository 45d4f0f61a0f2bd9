"""The inputs that carry samples are identified."""

from __future__ import annotations

import torch
from torch import nn

from gemini.capture import capture
from gemini.capture.batch_dim import BatchLayout
from gemini.planner.microbatch_split import find_batch_dims, find_part_like_batch


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


class Masked(nn.Module):
    """Skips the mask where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if mask.all() else y * mask[..., None]


def test_samples_on_the_branch_of_the_whole_batch() -> None:
    model, x, mask = Masked(), torch.randn(6, 5, 4), torch.ones(6, 5)
    mask[1:, 3:] = 0
    batch = BatchLayout((0, 0), 6)
    graph = capture(model, (x[:1], mask[:1]))
    part = find_part_like_batch(graph, model, ((x, mask), {}), batch, 1)
    assert part is not None
    assert not part[0][1].all()
    assert find_part_like_batch(graph, model, ((x, torch.ones(6, 5)), {}), batch, 1) is None
