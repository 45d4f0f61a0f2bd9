"""A remote call sends only changed state, and its results do not depend on that."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemini.guards.module_state import ModuleState
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Backward, Gradients, Refused
from gemini.runtime.worker.host_rng_check import HostRngCheck, address_in_python


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(1).to(x.device)  # of the default dtype
        return nn.functional.dropout(torch.tanh(x @ self.weight), 0.3, self.training) + made


class Noise(torch.autograd.Function):
    """Draws when it is differentiated."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Noisy(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noise.apply(x @ self.weight)


class Passing(Part):
    """Returns what it was given, and what depends on nothing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x.detach() + 1, x @ self.weight


def managed(model: nn.Module, pool: WorkerPool, *args: Any) -> tuple[nn.Module, nn.Module, ManagedModel]:
    """A model with units in workers, and the same model here."""
    local, found = copy.deepcopy(model), ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, found)
    state = torch.get_rng_state()
    for _ in range(2):
        model(*args)
    torch.set_rng_state(state)
    return model, local, found


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Any] = {
    "plain": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "double": lambda: default(torch.float64),
}


def test_every_call_runs_in_the_surroundings_of_the_program(pool: WorkerPool) -> None:
    x = torch.randn(8, 16)
    model, local, found = managed(nn.Sequential(*[Part() for _ in range(4)]), pool, x)
    order = [random.Random(0).choice(list(SURROUNDINGS)) for _ in range(40)]
    for number, name in enumerate(order):
        if number % 3 == 0:  # the same numbers again, others, and those that follow
            torch.manual_seed(number % 2)
        state = torch.get_rng_state()
        with SURROUNDINGS[name]():
            expected = local(x)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            made = model(x)
        assert torch.equal(after, torch.get_rng_state()), name
        assert made.dtype == expected.dtype, name
        assert torch.equal(made, expected), name
        assert str(made) == str(expected), name  # with the name of the node that it comes from
        assert (made.requires_grad, made.is_inference()) == (expected.requires_grad, expected.is_inference()), name
    assert found.calls
    assert not found.demotions
    assert not found.refused


def test_a_call_that_is_not_sent_has_told_nothing(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 16)
    model, local, found = managed(nn.Sequential(*[Part() for _ in range(4)]), pool, x)
    links = [worker.link for worker in pool.workers]
    for link in links:
        send = link.send

        def fail(message: Any, *args: Any, link: Any = link, send: Any = send, **kwargs: Any) -> Any:
            monkeypatch.setattr(link, "send", send)
            raise RuntimeError("not now")

        monkeypatch.setattr(link, "send", fail)
    for _ in range(3):
        with torch.no_grad():
            torch.manual_seed(3)
            expected = local(x)
            torch.manual_seed(3)
            assert torch.equal(model(x), expected)
    assert found.demotions


def test_a_backward_that_draws_is_run_here(pool: WorkerPool) -> None:
    x = torch.randn(8, 16)
    model, local, found = managed(nn.Sequential(Part(), Noisy(), Part(), Noisy()), pool, x)
    for _ in range(3):
        results = []
        for one in (local, model):
            torch.manual_seed(4)
            one.zero_grad()
            one(x).square().sum().backward()
            results.append([*(p.grad.clone() for p in one.parameters()), torch.get_rng_state()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert sorted(found.refused) == ["1", "3"], found.refused
    assert not found.demotions


class Switching(Part):
    """Turns a switch of the whole process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(bool(x.sum() > 0))
        return x @ self.weight


def test_a_unit_that_turns_switches_is_run_here(pool: WorkerPool) -> None:
    x = torch.ones(8, 16)
    model, _, found = managed(nn.Sequential(Part(), Switching(), Switching()).eval(), pool, -x)
    with torch.no_grad():
        for part in model:
            part.weight.copy_(torch.eye(16))
    try:
        for sign in (1, -1, 1, -1):
            model(sign * x)
            assert torch.are_deterministic_algorithms_enabled() == (sign > 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sorted(found.refused) == ["1", "2"]


def test_outputs_without_gradient_need_no_graph(pool: WorkerPool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Passing(), Part()

        def forward(self, x: torch.Tensor) -> Any:
            same, apart, made = self.one(x)
            return same, apart, self.two(made)

    model, local, _ = managed(Net().eval(), pool, torch.randn(8, 16))
    for wants in (False, True):
        x = torch.randn(8, 16, requires_grad=wants)
        (same, apart, made), (_, apart2, made2) = model(x), local(x)
        assert same is x
        assert torch.equal(apart, apart2)
        assert apart.grad_fn is None
        assert not apart.requires_grad
        assert torch.equal(made, made2)
        assert made.requires_grad
        found = torch.autograd.grad(made.sum(), list(model.parameters()))
        expected = torch.autograd.grad(made2.sum(), list(local.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        assert not any(t.requires_grad for t in model(torch.randn(8, 16)))


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: random.seed(0),
        np.random.rand,
        np.random.randn,
        lambda: np.random.seed(0),
        lambda: np.random.set_state(np.random.RandomState(0).get_state()),
    ],
)
def test_every_draw_is_noticed(draw: Any) -> None:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        draws = HostRngCheck()
        assert not draws.was_used()
        for _ in range(4):  # a second of a pair, and the same seed again, change no state but the rest's
            draw()
            assert draws.was_used()
            assert not draws.was_used()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def test_the_state_of_pythons_generator_is_found() -> None:
    assert address_in_python()


def test_a_snapshot_sees_what_has_changed() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.items, self.loose = nn.BatchNorm1d(3), [1, 2], torch.zeros(2)

    def put(module: Held) -> None:
        module.inner.running_mean = module.inner.running_mean.clone()

    changes: list[Any] = [
        lambda module: module.items.append(3),
        lambda module: setattr(module, "count", 1),
        lambda module: module.loose.add_(1),
        lambda module: setattr(module.inner, "momentum", 0.5),
        put,
        lambda module: module.inner.register_parameter("other", nn.Parameter(torch.zeros(1))),
        lambda module: setattr(module.inner, "weight", nn.Parameter(module.inner.weight.detach())),
        lambda module: setattr(module, "inner", nn.BatchNorm1d(3)),
    ]
    for change in changes:
        module = Held()
        snapshot = ModuleState(module)
        assert not snapshot.find_change()
        module.eval()
        assert not snapshot.find_change()
        change(module)
        assert snapshot.find_change()


def test_graphs_are_forgotten_also_where_no_other_call_follows(pool: WorkerPool) -> None:
    model, _, found = managed(nn.Sequential(Part(), Part()), pool, torch.randn(4, 16))
    unit, other = found.remote_modules.values()
    assert unit.worker is not other.worker
    made = model(torch.randn(4, 16))
    call = unit.worker.next_number() - 1

    def asked() -> Any:
        request = Backward(unit.worker.next_number(), call, [], [0], [], [torch.ones(4, 16)])
        return unit.worker.ask(request, "backward")

    found.release_dropped()
    assert isinstance(asked(), Gradients)
    del made
    found.release_dropped()
    assert isinstance(asked(), Refused)
