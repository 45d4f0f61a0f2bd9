"""Changes deep inside the attributes of modules take effect at once."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.capture.python_state import fingerprint
from gemini.guards.module_state import ModuleState


class Slotted:
    __slots__ = ("tau",)

    def __init__(self) -> None:
        self.tau = 1.0


def closed() -> tuple[Callable[[], float], Callable[[float], None]]:
    tau = 1.0

    def told() -> float:
        return tau

    def tell(value: float) -> None:
        nonlocal tau
        tau = value

    return told, tell


def test_it_is_noticed_in_what_modules_hold() -> None:
    model: Any = nn.Linear(3, 3)
    model.nest, model.slotted, model.array = types.SimpleNamespace(inner={"a": [1.0]}), Slotted(), np.ones(2)
    model.method, model.holds = Slotted().__eq__, types.SimpleNamespace(tensor=torch.ones(1))
    model.told, tell = closed()
    model.table = torch.ones(2)
    changes: list[Callable[[], Any]] = [
        lambda: model.nest.inner["a"].__setitem__(0, 2.0),
        lambda: setattr(model.slotted, "tau", 2.0),
        lambda: model.array.__setitem__(0, 2.0),
        lambda: model.holds.tensor.add_(1),
        lambda: tell(2.0),
        lambda: model.table.data.fill_(2.0),
    ]
    reads = [f"{name}@" for name in ("nest", "slotted", "array", "told")]
    for change in changes:
        snapshot, before = ModuleState(model), fingerprint(model, reads)
        assert not snapshot.find_change()
        change()
        assert snapshot.find_change()
        assert (fingerprint(model, reads) == before) is (change in (changes[3], changes[5]))
