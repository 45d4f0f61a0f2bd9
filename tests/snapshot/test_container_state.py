"""Changes that a forward makes in tuples, slots, closures, arrays, generators and namespaces are undone."""

from __future__ import annotations

import argparse
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.purity.proof import prove_purity
from gemini.snapshot.model_state import AttributeSnapshot, ModelSnapshot


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def closure() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def add(holder: Any) -> None:
    holder.count = getattr(holder, "count", 0) + 1


def draw(source: torch.Generator) -> None:
    torch.rand(1, generator=source)


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda: ([0], Slotted()), lambda held: add(held[1]), lambda held: held[1].count),
    "list in a tuple": (lambda: ([0],), lambda held: held[0].append(1), lambda held: list(held[0])),
    "slots": (Slotted, add, lambda held: held.count),
    "closure": (closure, lambda held: held(), lambda held: held.__closure__[0].cell_contents),
    "array": (lambda: np.zeros(2), lambda held: held.__setitem__(0, held[0] + 1), lambda held: held.tolist()),
    "bytes": (lambda: bytearray(2), lambda held: held.__setitem__(0, held[0] + 1), bytes),
    "Python's generator": (lambda: random.Random(0), lambda held: held.random(), lambda held: held.getstate()),
    "NumPy's generator": (
        lambda: np.random.default_rng(0),
        lambda held: held.random(),
        lambda held: str(held.bit_generator.state),
    ),
    "NumPy's older one": (
        lambda: np.random.RandomState(0),
        lambda held: held.rand(),
        lambda held: str(held.get_state()),
    ),
    "torch's generator": (
        lambda: (torch.Generator(),),
        lambda held: draw(held[0]),
        lambda held: held[0].get_state().tolist(),
    ),
    "namespace": (types.SimpleNamespace, add, lambda held: dict(vars(held))),
    "parsed arguments": (argparse.Namespace, add, lambda held: dict(vars(held))),
}


class Holding(nn.Module):
    def __init__(self, held: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.held, self.change = nn.Linear(2, 2), held, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.held)
        return self.layer(x)


@pytest.mark.parametrize("name", STATES)
def test_changes_are_seen_and_undone(name: str) -> None:
    make, change, look = STATES[name]
    model = Holding(make(), change)
    held, saved, before, live = AttributeSnapshot(model), ModelSnapshot(model), look(model.held), model.held
    assert not held.find_changes()
    model(torch.ones(1, 2))
    assert look(model.held) != before
    assert held.find_changes() == {"": ["held"]}
    held.restore()
    assert look(model.held) == before
    assert model.held is live
    assert not held.find_changes()
    model(torch.ones(1, 2))
    saved.restore()
    assert look(model.held) == before


@pytest.mark.parametrize("held", [itertools.count(), iter([1, 2]), (number for number in range(3))])
def test_modules_with_iterators_are_not_tried_out(held: Any) -> None:
    assert "self.held" in prove_purity(Holding((held,), lambda held: next(held[0]))).reason
    assert not prove_purity(Holding([1, 2], len)).reason


class Batches:
    """An iterator of the program, whose state can be put back."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


def test_iterators_of_the_program_can_be_put_back() -> None:
    model = Holding(Batches(), next)
    assert not prove_purity(model).reason
    held = AttributeSnapshot(model)
    model(torch.ones(1, 2))
    held.restore()
    assert model.held.at == 0


def test_modules_that_a_forward_adds_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    saved = ModelSnapshot(model)
    model.append(nn.Linear(2, 2))
    assert saved.attributes.find_changes() == {"": ["1"]}
    saved.restore()
    assert len(model) == 1


def test_capture_leaves_no_entries_of_its_own_sizes_in_a_cache() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, torch.Tensor] = {8: torch.ones(8, 1)}
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) not in self.known:
                self.known[len(x)] = torch.ones(len(x), 1)
            return self.linear(x) * self.known[len(x)]

    model = Caching()
    capture(model, (torch.ones(4, 2),))
    assert [*model.known] == [8]
