"""An internal fault is undone and the call repeated locally, with one log line."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import WorkerError
from gemini.runtime.eager.remote_module import RemoteModule
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Backward, Forward
from gemini.runtime.transport.link import Link


def is_away() -> bool:
    """Whether this runs in a worker. Asked when it is: what the file found when it was run came along."""
    return "gemini.runtime.worker.output_relay" in sys.modules


class Picky:
    """Does not survive one leg of the journey: `there` (packing here), `arriving`, `back` (packing there), `home`."""

    def __init__(self, leg: str) -> None:
        self.leg = leg

    def __reduce__(self) -> Any:
        if self.leg == ("back" if is_away() else "there"):
            raise pickle.PicklingError(f"lost on the way {self.leg}")
        return _rebuild, (self.leg, is_away())


def _rebuild(leg: str, from_away: bool) -> Picky:
    if (leg == "arriving" and not from_away and is_away()) or (leg == "home" and from_away):
        raise pickle.UnpicklingError(f"lost on the way {leg}")
    return Picky(leg)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.batch = nn.Parameter(torch.randn(16, 16) / 4), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        x = nn.functional.dropout(self.batch(torch.tanh(x @ self.weight)), 0.2, self.training)
        return x, Picky(extra.leg) if extra is not None else None  # not the object that it was given


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        for part in self.parts:
            x, extra = part(x, extra)
        return x


def pair(pool: WorkerPool, **options: Any) -> tuple[nn.Module, nn.Module, ManagedModel]:
    """A managed model after a few steps, and the same model here."""
    model = Net()
    managed = ManagedModel(model, pool, **options)
    dispatch.manage(model, managed)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    model.zero_grad()
    return model, copy.deepcopy(model), managed


def same(model: nn.Module, local: nn.Module, extra: Any = None, steps: int = 3) -> None:
    """Both give the same, to the bit, from the same state."""
    for _ in range(steps):
        x, drawn = torch.randn(8, 16), torch.get_rng_state()
        expected = local(x, extra)
        expected.square().sum().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(drawn)
        found = model(x, extra)
        found.square().sum().backward()
        assert torch.equal(after, torch.get_rng_state()), "drawn twice"
        assert torch.equal(expected, found)
    for one, other in zip(model.state_dict().values(), local.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.parameters(), local.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


LEGS = ["there", "arriving", "back", "home"]


class Marked(torch.Tensor):
    """A tensor of a class of the program's."""


def test_what_no_unit_can_be_sent_is_said_once(pool: WorkerPool, capsys: Any) -> None:
    model, _, managed = pair(pool)
    capsys.readouterr()
    assert type(model(torch.ones(8, 16).as_subclass(Marked))) is Marked
    assert managed.demotions >= 4
    assert capsys.readouterr().err.count("runs in this process: forward") == 1


@pytest.mark.parametrize("leg", LEGS)
def test_what_cannot_make_the_journey_stays_here(leg: str, pool: WorkerPool, capsys: Any) -> None:
    model, local, managed = pair(pool)
    capsys.readouterr()
    same(model, local, Picky(leg))
    assert managed.demotions == 4  # each part once: then it is not a unit any more
    assert capsys.readouterr().err.count("runs in this process") == 4
    assert not pool.loss


@pytest.mark.parametrize("leg", LEGS)
def test_strict_makes_it_an_error(leg: str, pool: WorkerPool) -> None:
    model, _, managed = pair(pool, quiet=True, strict=True)
    buffers, drawn = [b.clone() for b in model.parts[0].buffers()], torch.get_rng_state()
    with pytest.raises(WorkerError, match="strict=True"):
        model(torch.ones(8, 16), Picky(leg))
    assert managed.demotions == 1
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.parts[0].buffers(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_a_fault_in_our_own_code(kind: type, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, local, managed = pair(pool, quiet=True)
    asked, real = [0], Link.send

    def send(self: Link, request: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(request, kind):
            asked[0] += 1
            if asked[0] % 3 == 0:  # the worker is told of a unit or graph that it does not have
                name = "unit" if kind is Forward else "call"
                request = request._replace(**{name: 10**9})
        return real(self, request, *rest, **options)

    monkeypatch.setattr(Link, "send", send)
    same(model, local)
    assert managed.demotions
    assert not pool.loss


def test_a_fault_of_ours_before_anything_is_asked(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, local, managed = pair(pool, quiet=True)
    monkeypatch.setattr(RemoteModule, "find_obstacle", lambda _: {}["nothing"])
    same(model, local)
    assert managed.demotions >= 4


def test_a_fault_of_ours_while_planning(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    local = copy.deepcopy(model)
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    monkeypatch.setattr(ManagedModel, "_install", lambda *_: {}["nothing"])
    same(model, local)
    assert managed.demotions == 1


def test_non_finite_losses_are_as_on_one_device(pool: WorkerPool) -> None:
    model, local, managed = pair(pool, quiet=True)
    for value in (float("inf"), float("nan"), -float("inf")):
        for one in (model, local):
            torch.manual_seed(0)
            one.zero_grad()
            one(torch.full((8, 16), value)).square().sum().backward()
        for mine, theirs in zip([*model.parameters(), *model.buffers()], [*local.parameters(), *local.buffers()],
                                strict=True):  # fmt: skip
            assert torch.equal(mine.isnan(), theirs.isnan())
            if mine.grad is not None:
                assert torch.equal(mine.grad.isnan(), theirs.grad.isnan())
    assert not managed.demotions


@pytest.mark.slow
def test_a_model_that_is_deleted_goes_and_with_the_last_its_workers() -> None:
    pool = WorkerPool(2, 1)
    pids = [worker.process.pid for worker in pool.workers]
    models = [pair(pool, quiet=True)[0] for _ in range(2)]
    gone = [weakref.ref(model) for model in models]
    crew_gone = weakref.ref(pool)
    held = pool.workers[0].link.shared_numbers
    numbers = len(held)
    del models[0]
    gc.collect()
    assert gone[0]() is None
    assert len(pool.workers[0].link.shared_numbers) < numbers
    models.append(pair(pool, quiet=True)[0])  # identities may be used again
    same(models[-1], copy.deepcopy(models[-1]))
    out = models[0](torch.randn(8, 16))
    del pool
    models.clear()
    gc.collect()
    out.sum().backward()  # what is still needed lives on
    assert crew_gone() is not None
    del out
    gc.collect()
    assert crew_gone() is None
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_threads_of_the_program_may_use_one_model(pool: WorkerPool) -> None:
    model, local, managed = pair(pool, quiet=True)
    model.eval(), local.eval()
    x = torch.randn(8, 16)
    expected = local(x)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(model(x) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(one, expected) for one in found)
    assert not managed.demotions


class Keeps(nn.Module):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(16, 16), kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize(("leg", "is_ours"), [("arriving", True), ("there", False), ("", False)])
def test_strict_raises_where_a_unit_is_refused_for_a_fault_of_ours(leg: str, is_ours: bool, pool: WorkerPool) -> None:
    model, x = nn.Sequential(Keeps(), Keeps(Picky(leg)), Keeps(), Keeps()), torch.randn(2, 16)
    managed = ManagedModel(model, pool, quiet=True, strict=True)
    dispatch.manage(model, managed)
    expected = model(x)
    for _ in range(2):
        if is_ours:
            with pytest.raises(
                WorkerError, match=r"1 cannot run in worker \d: (?s:.*)lost on the way arriving(?s:.*)strict=True"
            ):
                model(x)
        else:
            assert torch.equal(model(x), expected)
    assert bool(managed.remote_modules) != is_ours
    assert set(managed.refused) == ({"1"} if leg else set())


class Counts(nn.Module):
    """Cannot run elsewhere, and has no modules inside that could."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(4)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight * self.calls


def test_a_model_with_nothing_to_run_elsewhere_says_why(pool: WorkerPool, capsys: Any) -> None:
    model, x = nn.Sequential(Counts(), Counts()), torch.randn(2, 4)
    managed = ManagedModel(model, pool)
    dispatch.manage(model, managed)
    found = [model(x).detach() for _ in range(4)]
    assert [float((one / x).mean().round()) for one in found] == [1.0, 4.0, 9.0, 16.0]
    assert not managed.remote_modules
    lines = [line for line in capsys.readouterr().err.splitlines() if "runs in this process" in line]
    assert lines == [f"gemini: Sequential runs in this process: 1: {managed.refused['1']}"]
    assert "attributes of a Counts have changed" in lines[0]
