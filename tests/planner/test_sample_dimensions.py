"""The sample dimension of a call is found where inputs disagree about their first dimension."""

from __future__ import annotations

import torch
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims


class Words(nn.Module):
    """Sequences come first, states of layers have them second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, object]:
        x, states = self.lstm(self.embed(x), states)
        return self.out(x.reshape(-1, 6)), states


def test_states_of_one_layer_are_no_single_sample() -> None:
    states = torch.zeros(1, 8, 6), torch.zeros(1, 8, 6)
    found = find_batch_dims(Words(), (torch.randint(9, (8, 5)), states), {})
    assert found is not None
    assert (found.size, found.dims) == (8, (0, 1, 1))


def test_one_sample_is_one() -> None:
    states = torch.zeros(1, 1, 6), torch.zeros(1, 1, 6)
    found = find_batch_dims(Words(), (torch.randint(9, (1, 5)), states), {})
    assert found is not None
    assert found.size == 1
