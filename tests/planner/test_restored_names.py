"""Names that an evaluation run registers in the model are removed again before training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims


class DroppedWeights(nn.Module):
    """Dropout on a weight: in evaluation the attribute is the parameter itself, and `setattr` registers it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        raw = self.inner._parameters.pop("weight")
        self.inner.register_parameter("weight_raw", raw)

    def forward(self, x: torch.Tensor) -> Any:
        self.inner.weight = F.dropout(self.inner.weight_raw, 0.5, self.training)
        return F.linear(x, self.inner.weight, self.inner.bias)


def test_a_parameter_with_one_more_name_is_put_back() -> None:
    model, x = DroppedWeights(), torch.randn(4, 4)
    model(x)
    names = [name for name, _ in model.named_parameters()]
    found = find_batch_dims(model, (x,), {})
    assert found is not None
    assert found.size == 4
    assert [name for name, _ in model.named_parameters()] == names
    model(x)  # and can be called again
