"""Changes that a forward makes in objects and nested containers are detected and undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.snapshot.model_state import AttributeSnapshot, ModelSnapshot


class Meter:
    """Counts, and keeps what it has counted."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []
        self.owner: object = self

    def step(self) -> None:
        self.count += 1
        self.seen.append(self.count)


class Counting(nn.Module):
    """A layer whose forward leaves traces out of its own attributes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(2, 2), where
        self.meter, self.log, self.meters = Meter(), {"steps": [0]}, [Meter()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "object":
            self.meter.step()
        elif self.where == "nested":
            self.log["steps"][0] += 1
        elif self.where == "object in a list":
            self.meters[0].step()
        return self.layer(x)

    def traces(self) -> tuple[object, ...]:
        meters = (self.meter, *self.meters)
        return (*((meter.count, list(meter.seen)) for meter in meters), list(self.log["steps"]))


@pytest.mark.parametrize(
    ("where", "name"), [("object", "meter"), ("nested", "log"), ("object in a list", "meters"), ("nowhere", "")]
)
def test_changes_are_seen_and_undone(where: str, name: str) -> None:
    model = Counting(where)
    held, before = AttributeSnapshot(model), model.traces()
    meter = model.meter
    model(torch.ones(1, 2))
    assert held.find_changes() == ({"": [name]} if name else {})
    held.restore()
    assert model.traces() == before
    assert model.meter is meter
    assert not held.find_changes()


def test_frozen_layers_are_trained_again() -> None:
    model = nn.Linear(2, 2)
    saved = ModelSnapshot(model)
    model.requires_grad_(False)
    saved.restore()
    assert all(one.requires_grad for one in model.parameters())
