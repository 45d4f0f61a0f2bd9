"""A model that returns a NumPy array has no plan, and the reason says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step


class Attentive(nn.Module):
    """The weights of its attention are for a picture, as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 5), nn.Linear(5, 2)

    def attend(self, output: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, Any]:
        scores = torch.softmax(torch.bmm(output, state.view(-1, 5, 1)).squeeze(2), 1)
        return torch.bmm(output.transpose(1, 2), scores.unsqueeze(2)).squeeze(2), scores.data.numpy()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, (state, _) = self.lstm(self.embedding(x).permute(1, 0, 2))
        context, scores = self.attend(output.permute(1, 0, 2), state)
        return self.out(context), scores


def test_a_returned_array_is_a_reason() -> None:
    with pytest.raises(UnplannableError, match=r"is no tensor|leaves the tensor world"):
        plan_step(Attentive(), (torch.randint(9, (6, 3)),), {}, PlanRequest(workers=2, micro_batches=2, cache=False))
