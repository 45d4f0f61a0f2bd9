"""Data-dependent sizes are tracked per dimension, even where one happens to equal a static size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import capture

ROWS, LENGTH, WIDTH = 4, 6, 8


class Distinct(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.unique(ids)


class Longest(nn.Module):
    """Contents become numbers, numbers sizes, in a module that is not looked into."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.new_zeros(int(ids.max()) + 1 - 1, 2)


class Asks(nn.Module):
    """Branches on a size."""

    def __init__(self, size: Callable[[Any, torch.Tensor, torch.Tensor], int]) -> None:
        super().__init__()
        self.size, self.distinct, self.longest = size, Distinct(), Longest()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.size(self, h, ids) > 5:
            h = h * 2
        return self.last(h.mean(1))


SIZES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], int]] = {
    "different ones": lambda _, h, ids: torch.unique(ids).shape[0],
    "different ones, by name": lambda _, h, ids: torch.unique(input=ids).shape[0],
    "of a leaf": lambda m, h, ids: m.distinct(ids).shape[0],
    "numbers read in a leaf": lambda m, h, ids: m.longest(ids).shape[0],
    "different columns": lambda _, h, ids: torch.unique(torch.stack([ids, ids]), dim=1).sum(0).shape[0],
    "masked columns": lambda _, h, ids: h[:, ids > 0].sum(0).shape[0],
    "masked rows": lambda _, h, ids: h.transpose(0, 1)[ids > 0].shape[0],
    "flattened": lambda _, h, ids: h[:, ids > 0].flatten(1).shape[1] // WIDTH,
    "written in place": lambda _, h, ids: torch.unique(ids).add_(1).shape[0],
    "all elements": lambda _, h, ids: h[:, ids > 0].numel() // (WIDTH * h.shape[0]),
    "a named mask": lambda _, h, ids: torch.masked_select(ids, mask=ids > 0).shape[0],
    "a tensor as a number": lambda _, h, ids: torch.arange(ids.max() + 1).shape[0],
    "a tensor in a slice": lambda _, h, ids: h[:, : ids.max() + 1].shape[1],
    "a tensor in a view": lambda _, h, ids: torch.arange(2520).view(ids.max() + 1, -1).shape[0],
    "classes": lambda _, h, ids: F.one_hot(ids).shape[1],
    "repeated": lambda _, h, ids: h.repeat_interleave(ids, dim=1).sum(0).shape[0],
    "cut off": lambda _, h, ids: h[:, ids > 0][:, :5].shape[1],
    "after a layer": lambda m, h, ids: m.first(h[:, ids > 0]).shape[1],
}


@pytest.mark.parametrize(
    "ids", [[0, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 8]], ids=str
)
@pytest.mark.parametrize("name", SIZES)
def test_a_branch_on_a_size_that_contents_decide_depends_on_contents(name: str, ids: list[int]) -> None:
    graph = capture(Asks(SIZES[name]), (torch.randn(ROWS, LENGTH, WIDTH), torch.tensor(ids)))
    assert graph.is_whole or any(guard.data for guard in graph.guards), [str(guard) for guard in graph.guards]


@pytest.mark.parametrize(
    "size",
    [
        lambda _, h, ids: h[:, ids > 0].size(0),  # of the samples
        lambda _, h, ids: F.one_hot(ids, 9).shape[0],
        lambda _, h, ids: h[:, ids].shape[1],
        lambda _, h, ids: h[:, ids[0]].shape[1],
        lambda _, h, ids: ids.to("cpu").index_put((ids > 3,), ids[:1]).shape[0],
        lambda _, h, ids: h[:, ids > 0].mean(1).shape[1],
    ],
)
def test_other_sizes_do_not(size: Callable[[Any, torch.Tensor, torch.Tensor], int]) -> None:
    graph = capture(Asks(size), (torch.randn(ROWS, LENGTH, WIDTH), torch.tensor([0, 1, 2, 3, 3, 3])))
    assert not graph.is_whole
    assert not any(guard.data for guard in graph.guards), [str(guard) for guard in graph.guards]
    assert graph.batch_size == ROWS
