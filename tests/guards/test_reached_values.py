"""Changes of outside values that a model's code reads take effect in workers too."""

from __future__ import annotations

import argparse
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.purity import value_watch
from tests.guards.proven_reads import ProvenReads

factor = 1.0
options = argparse.Namespace(tau=1.0, epoch=0)
shift = torch.zeros(8)
seen: list[int] = []
other = nn.Linear(8, 8)
steady = {"scale": 1.0}
criterion = nn.CrossEntropyLoss()


class Settings:
    power = 1.0


def by_function(x: torch.Tensor) -> torch.Tensor:
    return x * factor


class Reads(nn.Module):
    """A layer whose code reads one of them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.lin, self.read = nn.Linear(8, 8), getattr(self, what)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(torch.relu(self.lin(x)))


class Number(Reads):
    def __init__(self) -> None:
        super().__init__("number")

    def number(self, x: torch.Tensor) -> torch.Tensor:
        return by_function(x)


class Attribute(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * options.tau


class Tensor(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + shift


class Counted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return super().forward(x)


class OfAClass(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * Settings.power


class OfItsClass(nn.Linear):
    sharpness = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.sharpness


class Weights(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(other(x))


class Named(nn.Module):
    """Has a layer whose name is that of weights of the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


class Steady(nn.Linear):
    """Reads what stays, and does not read what changes beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = criterion(x, x.argmax(1)) * 0.0
        return super().forward(x) * steady["scale"] + loss

    def fit(self) -> None:
        print(factor, options.epoch, other)


def change(step: int) -> None:
    global factor, shift
    factor, shift = 1.0 + 0.3 * step, torch.full((8,), 0.1 * step)
    options.tau, options.epoch, Settings.power = 1.0 + 0.2 * step, step, 1.0 - 0.1 * step
    OfItsClass.sharpness = 1.0 + 0.1 * step


def trained(model: nn.Module) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.3)
    told = []
    for step in range(5):
        change(step)
        x, y = torch.randn(8, 8), torch.randint(8, (8,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


def test_steps_are_those_of_one_process(tmp_path: Path) -> None:
    change(0)
    torch.manual_seed(1)
    parts = [Attribute(8, 8), Tensor(8, 8), Counted(8, 8), OfAClass(8, 8), OfItsClass(8, 8), Weights(8, 8)]
    model = nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in parts))
    plain, kept = copy.deepcopy(model), copy.deepcopy(other.state_dict())
    expected, after, counted = trained(plain), copy.deepcopy(other.state_dict()), len(seen)
    other.load_state_dict(kept)
    change(0)
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    assert trained(GeminiCompiler().compiler(model, config=config)) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(other.state_dict(), after)
    assert len(seen) == 2 * counted


@pytest.mark.parametrize("kind", [Number, Attribute, Tensor, Counted, OfAClass, OfItsClass, Weights])
def test_it_is_noticed(kind: type[nn.Module]) -> None:
    change(0)
    given: Any = () if kind is Number else (8, 8)
    model = kind(*given)
    change(0)
    read = ProvenReads(model)
    change(1)
    model(torch.randn(3, 8))
    change(2)
    assert read.check()


@pytest.mark.parametrize("make", [lambda: Steady(8, 8), Named], ids=["steady", "named alike"])
def test_what_a_forward_does_not_read_may_change(make: Callable[[], nn.Module]) -> None:
    read = ProvenReads(make())
    change(3)
    assert read.check() is None


cache: dict[int, torch.Tensor] = {}
history: dict[int, int] = {}


class Cached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.arange(len(x)).unsqueeze(1)
        return super().forward(x) + cache[len(x)]


class Told(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        history[len(history)] = len(x)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Cached, Told])
def test_code_that_fills_an_outside_container_is_impure(kind: type[nn.Module]) -> None:
    assert "changes " in ProvenReads(kind(8, 8)).check()


activation = torch.tanh


def squash(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return torch.sigmoid(x) * by


class Kinds:
    gain = 1.0


kinds = Kinds()
calls = {"n": 0}


class Called(nn.Linear):
    """Its code, and that of what it calls, is changed in mid-run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activation(squash(self.inner(x))) * kinds.gain

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Heir(Called):
    pass


def another_function(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "activation", torch.sin)


def another_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Called, "forward", lambda self, x: torch.sin(self.inner(x)))


def another_method_inside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Called, "inner", lambda self, x: F.linear(3 * x, self.weight))


def a_method_of_an_heir(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heir, "forward", lambda self, x: torch.sin(self.inner(x)), raising=False)


def other_code(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(squash, "__code__", (lambda x, by=1.0: torch.relu(x) * by).__code__)


def another_attribute_of_a_class(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Kinds, "gain", 3.0)


def another_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(squash, "__defaults__", (3.0,))


CHANGES = [
    another_function, another_method, another_method_inside, a_method_of_an_heir, other_code, another_default,
    another_attribute_of_a_class,
]  # fmt: skip


def by_changed_code(model: nn.Module, alter: Callable[[pytest.MonkeyPatch], None]) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        for step in range(6):
            if step == 4:
                alter(patch)
            loss = model(torch.randn(8, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
    return told


@pytest.mark.parametrize("alter", CHANGES, ids=[one.__name__ for one in CHANGES])
@pytest.mark.parametrize("schedule", ["auto", "none"])
def test_code_that_is_changed_in_mid_run_is_called(
    alter: Callable[[pytest.MonkeyPatch], None], schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_watch, "_known", {})  # changed once and for all, for later tests too
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(Heir(8, 8), nn.Tanh()) for _ in range(4)))
    expected = by_changed_code(copy.deepcopy(model), alter)
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, quiet=True, run_folder=str(tmp_path)
    )
    model = GeminiCompiler().compiler(model, config=config)
    assert by_changed_code(model, alter) == pytest.approx(expected, rel=1e-5)
    assert expected[3] != pytest.approx(expected[4], rel=1e-2)  # it matters


class Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls["n"] += 1
        return super().forward(x) * (1 + calls["n"] % 3)


@pytest.mark.parametrize("schedule", ["auto", "none"])
def test_what_code_counts_is_counted_once_a_call(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(Counting(8, 8), nn.Tanh()) for _ in range(3)))
    calls["n"] = 0
    expected, counted = by_changed_code(copy.deepcopy(model), lambda _: None), calls["n"]
    calls["n"] = 0
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, quiet=True, run_folder=str(tmp_path)
    )
    model = GeminiCompiler().compiler(model, config=config)
    assert by_changed_code(model, lambda _: None) == pytest.approx(expected, rel=1e-5)
    assert calls["n"] == counted


def test_classes_and_what_their_methods_hold_are_let_go() -> None:
    def made() -> nn.Module:
        large = nn.Linear(8, 8).requires_grad_(False)

        class Local(nn.Linear):
            gain = 2.0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return large(super().forward(x)) * self.gain

        return Local(8, 8)

    model = made()
    read, gone = ProvenReads(model), weakref.ref(type(model))
    assert {"Local.forward", "Local.gain"} <= {entry.name for entry in read.entries}
    assert not read.check()
    del model, read
    gc.collect()
    assert gone() is None


nested = {"loss": {"weight": 1.0}}
run = argparse.Namespace(model=argparse.Namespace(heat=1.0))


class Scaled:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


scaled = Scaled()


class Frame(nn.Module):
    """Its forward calls a method that classes made of it have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Nested(Frame):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * nested["loss"]["weight"]


class InAnObject(Frame):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * run.model.heat


class OfACallable(Frame):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x)


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        (Nested, lambda: nested["loss"].update(weight=2.0), "nested"),
        (InAnObject, lambda: setattr(run.model, "heat", 2.0), "run.model.heat"),
        (OfACallable, lambda: setattr(scaled, "by", 2.0), "scaled.by"),
    ],
)
def test_what_lies_deeper_is_seen(kind: type[nn.Module], change: Callable[[], None], name: str) -> None:
    reads = ProvenReads(kind())
    assert not reads.check()
    change()
    assert reads.check() == f"its code reads {name}, which the script changes"


class Ring:
    """Objects that have each other, as members of an enumeration do."""

    first: Any
    gain = 2.0


Ring.first = Ring()
ring = Ring()


class InARing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * ring.first.first.gain


def test_objects_that_hold_each_other_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ProvenReads(InARing(8, 8))
    assert not read.check()
    monkeypatch.setattr(Ring, "gain", 3.0)
    assert read.check()


class Late(nn.Tanh):
    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def by_late_modules(model: nn.Sequential) -> list[float]:
    """Losses of steps, with a module that comes in mid-run, and whose class the program changes later."""
    losses = []
    for step in range(7):
        if step == 3:
            model[1] = Late()
        Late.gain = 1.0 if step < 6 else 2.0
        losses.append(F.cross_entropy(model(torch.ones(4, 8)), torch.tensor([0, 1, 2, 3])))
        losses[-1].backward()
    return [loss.item() for loss in losses]


def test_what_modules_that_come_in_mid_run_read_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    expected = by_late_modules(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    assert by_late_modules(GeminiCompiler().compiler(model, config)) == pytest.approx(expected)


def test_an_iterator_that_no_call_comes_to_is_not_in_the_way() -> None:
    """A LightningModule has its trainer, and so the iterator of its loader."""
    lightning = pytest.importorskip("lightning")

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self._trainer = nn.Linear(4, 4), {"batches": iter([1, 2, 3])}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    class Advancing(Trained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * next(self._trainer["batches"])

    class Own(Trained):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = iter([1, 2, 3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return passed(self, x)

    def passed(module: Own, x: torch.Tensor) -> torch.Tensor:
        return x * next(module.numbers)

    assert ProvenReads(Trained()).check() is None
    assert "self._trainer (builtins.list_iterator)" in ProvenReads(Advancing()).check()
    assert "self.numbers (builtins.list_iterator)" in ProvenReads(Own()).check()
