"""Changes of outside values are detected wherever the model's code reads them from."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gemini.capture.memoized import find_caches
from gemini.guards.monkeypatches import LibraryPatches
from gemini.purity import value_watch
from tests.guards.proven_reads import ProvenReads

Case = tuple[nn.Module, Callable[[], object]]


class Net(nn.Module):
    """Calls a function of the program's, which its class holds."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        if function is not None:
            self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.lin(x))


def around_a_method() -> Case:
    scale = 1.0

    class Local(Net):
        def function(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return Local(), change


def around_a_function() -> Case:
    options = types.SimpleNamespace(scale=1.0)
    return Net(lambda x: x * options.scale), lambda: setattr(options, "scale", 2.0)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * scaled.by  # type: ignore[attr-defined]


def attribute_of_a_function() -> Case:
    scaled.by = 1.0  # type: ignore[attr-defined]
    return Net(lambda x: scaled(2 * x)), lambda: setattr(scaled, "by", 2.0)


@dataclass
class Slotted:
    __slots__ = ("by",)
    by: float


slotted = Slotted(1.0)


def slot() -> Case:
    return Net(lambda x: x * slotted.by), lambda: setattr(slotted, "by", slotted.by + 1)


def module_with_getattr() -> Case:
    module: Any = types.ModuleType("settings_of_a_test")
    module.__file__ = __file__
    sys.modules["settings_of_a_test"] = module
    exec("values = {'tau': 1.0}\ndef __getattr__(name): return values.get(name, '')", vars(module))
    return Net(lambda x: x * module.tau), lambda: module.values.update(tau=2.0)


def imported_inside() -> Case:
    module = module_with_getattr()[0] and sys.modules["settings_of_a_test"]
    module.tau = 1.0  # type: ignore[attr-defined]

    def function(x: torch.Tensor) -> torch.Tensor:
        from settings_of_a_test import tau  # type: ignore[import-not-found]

        return x * tau  # type: ignore[no-any-return]

    return Net(function), lambda: setattr(module, "tau", 2.0)


class Asked:
    def __init__(self) -> None:
        self.values = {"tau": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.values[name]


asked = Asked()


def object_that_is_asked() -> Case:
    return Net(lambda x: x * asked.tau), lambda: asked.values.update(tau=asked.tau + 1)


def attribute_by_a_string() -> Case:
    options = types.SimpleNamespace(tau=1.0)
    return Net(lambda x: x * getattr(options, "tau", 1.0)), lambda: setattr(options, "tau", 2.0)


def attribute_that_is_set_later() -> Case:
    options = types.SimpleNamespace()
    return Net(lambda x: x * getattr(options, "tau", 1.0)), lambda: setattr(options, "tau", 2.0)


total = 1.0


def inside_a_partial() -> Case:
    return Net(functools.partial(lambda x, by: x * by * total, by=1)), lambda: globals().update(total=total + 1)


def in_a_table() -> Case:
    table = {"scale": lambda x: x * total}
    return Net(lambda x: table["scale"](2 * x)), lambda: globals().update(total=total + 1)


CASES = [
    around_a_method, around_a_function, attribute_of_a_function, slot, module_with_getattr, imported_inside,
    object_that_is_asked, attribute_by_a_string,
    attribute_that_is_set_later,
    inside_a_partial, in_a_table,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[one.__name__ for one in CASES])
def test_a_change_is_seen(case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_watch, "_known", {})
    monkeypatch.setitem(sys.modules, "settings_of_a_test", types.ModuleType(""))  # gone afterwards
    model, change = case()
    read = ProvenReads(model)
    for _ in range(2):
        model(torch.randn(2, 4))
        assert read.check() is None
    before = model(torch.ones(2, 4))
    change()
    assert not torch.equal(model(torch.ones(2, 4)), before)
    assert read.check().endswith("which the script changes")


def test_parts_around_a_function_are_of_the_model_or_an_obstacle() -> None:
    class Holding(Net):
        def __init__(self) -> None:
            part, act, whole = nn.Linear(4, 4), nn.Dropout(0.5), self
            super().__init__(lambda x: act(part(x)) + whole.lin.bias)
            self.part, self.act, parameters = part, act, [*part.parameters()]
            self.other = lambda x: x @ parameters[0]

    model, other = Holding(), nn.Linear(4, 4)
    read = ProvenReads(model)
    with torch.no_grad():
        model.eval().part.weight += 1
    assert not read.check()
    assert "other, which has weights" in ProvenReads(Net(lambda x: other(2 * x))).check()


def test_a_worker_has_not_all_globals() -> None:
    assert ProvenReads(Net(lambda x: x * globals()["total"])).check()


class Options(dict[str, float]):
    """Raises something else than Python expects for attributes that it has not."""

    __getattr__ = dict.__getitem__


strict = Options(tau=1.0)


class OfOptions(nn.Linear):
    options = strict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * strict.tau * self.options.tau


def test_objects_are_not_asked_for_what_they_have_not() -> None:
    model = OfOptions(4, 4)
    reads = ProvenReads(model), LibraryPatches(model)
    assert find_caches(model) == []
    assert not reads[0].check()
    assert not reads[1].check(model)
    strict["tau"] = 2.0
    assert "strict" in reads[0].check()


def test_functions_that_are_gone_are_no_obstacle() -> None:
    scale = 2.0
    model = Net(lambda x: x * scale)
    read = ProvenReads(model)
    del model.function
    assert not read.check()
    read.refresh()
    assert not read.check()


def test_what_is_put_back_was_changed() -> None:
    options = types.SimpleNamespace(tau=1.0)
    model = Net(lambda x: x * options.tau)
    reads = [ProvenReads(model), ProvenReads(model)]
    assert not any(read.check() for read in reads)
    options.tau = 2.0
    assert reads[0].check()
    options.tau = 1.0
    assert all(read.check() for read in reads)
