"""Gradients assigned without the autograd engine equal those it would assign."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from gemini.ir.interpreter import GuardBroken
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.deferred import pending_call
from gemini.runtime.pipelined.broadcast import Broadcast
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

Seen = list[Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def on_tensor(model: Net, seen: Seen) -> Any:
    return model.layers[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))


def after_accumulation(model: Net, seen: Seen) -> Any:
    return model.layers[0].weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))


def on_node(model: Net, seen: Seen) -> Any:
    edge = get_gradient_edge(model.layers[2].bias)
    edge.node.register_hook(lambda _, given: seen.append(given[0].clone()))
    return edge


def on_several(model: Net, seen: Seen) -> Any:
    several = [model.layers[0].weight, model.layers[4].bias]
    return register_multi_grad_hook(several, lambda given: seen.append([one.clone() for one in given]))


def in_anomaly_mode(_: Net, __: Seen) -> Any:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


WATCHING: list[Callable[[Net, Seen], Any]] = [on_tensor, after_accumulation, on_node, on_several, in_anomaly_mode]


def train(model: Net, watch: Callable[[Net, Seen], Any] | None, steps: int = 7, every: int = 1) -> list[Any]:
    torch.manual_seed(3)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    held = None if watch is None else watch(model, seen)
    for step in range(steps):
        loss = model(torch.randn(8, 6, dtype=torch.float64)).square().mean()
        loss.backward()
        assert loss.requires_grad
        assert loss.grad_fn is not None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.layers.parameters()), model.unused.grad]
        if step % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    if held is not None and watch is in_anomaly_mode:
        held.__exit__()
    return seen


def compare(pool: WorkerPool, watch: Callable[[Net, Seen], Any] | None, every: int = 1) -> Any:
    torch.manual_seed(1)
    model = Net().double()
    reference = copy.deepcopy(model)
    expected = train(reference, watch, every=every)
    story = manage(model, pool)
    found = train(model, watch, every=every)
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    asked, ask = [], pending_call.can_assign
    monkeypatch.setattr(pending_call, "can_assign", lambda targets: asked.append(ask(targets)) or asked[-1])
    return asked


def test_gradients_are_given_as_they_come(pool: WorkerPool, given: list[bool]) -> None:
    compare(pool, None)
    assert len(given) >= 3
    assert all(given)


def test_backward_without_gradient_mode(pool: WorkerPool, given: list[bool]) -> None:
    torch.manual_seed(1)
    model = Net().double()
    manage(model, pool)
    for _ in range(6):
        loss = model(torch.randn(8, 6, dtype=torch.float64)).square().mean()
        with torch.no_grad():
            loss.backward()
        assert loss.requires_grad
        model.zero_grad()
    assert True in given


def test_what_is_there_is_added_to(pool: WorkerPool, given: list[bool]) -> None:
    compare(pool, None, every=2)
    assert True in given
    assert False in given


@pytest.mark.sampled(3)
@pytest.mark.parametrize("watch", WATCHING)
@pytest.mark.filterwarnings("ignore")
def test_whoever_watches_sees_what_autograd_does(
    watch: Callable[[Net, Seen], Any], pool: WorkerPool, given: list[bool]
) -> None:
    compare(pool, watch)
    assert not any(given)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The gradients that parameters have had before they were computed."""
    made: list[Any] = []

    class Noted(pending_call.EarlyGradients):
        def give(self) -> None:
            made.append(self)
            super().give()

    monkeypatch.setattr(pending_call, "EarlyGradients", Noted)
    return made


def all_learning() -> Net:
    torch.manual_seed(1)
    model = Net().double()
    model.unused.requires_grad_(False)
    return model


def once(monkeypatch: pytest.MonkeyPatch, ahead: list[Any], what: Callable[[], None]) -> None:
    """Do something when the replies to the first step have come for which parameters have gradients ahead."""
    done, ask = [], Broadcast.ask

    def asked(self: Broadcast, *given: Any) -> Any:
        replies = ask(self, *given)
        if ahead and not done:
            done.append(True)
            what()
        return replies

    monkeypatch.setattr(Broadcast, "ask", asked)


def test_parameters_have_gradients_ahead(pool: WorkerPool, ahead: list[Any]) -> None:
    model = all_learning()
    expected = train(copy.deepcopy(model), None)
    manage(model, pool)
    torch.testing.assert_close(train(model, None), expected, rtol=1e-10, atol=1e-12)
    assert len(ahead) >= 2


def test_gradients_ahead_of_a_step_that_fails_are_taken_back(
    pool: WorkerPool, ahead: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = all_learning()
    expected = train(copy.deepcopy(model), None)
    manage(model, pool)

    def fail() -> None:
        raise GuardBroken("this batch goes another way")

    once(monkeypatch, ahead, fail)
    torch.testing.assert_close(train(model, None), expected, rtol=1e-10, atol=1e-12)
    assert ahead


def test_hooks_that_come_while_a_step_runs_see_its_gradients(
    pool: WorkerPool, ahead: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal adds one."""
    model, seen = all_learning(), []
    manage(model, pool)

    def handle(*_: Any) -> None:
        model.layers[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))

    before = signal.signal(signal.SIGALRM, handle)
    try:
        once(monkeypatch, ahead, lambda: signal.raise_signal(signal.SIGALRM))
        for _ in range(8):
            model.zero_grad()
            model(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
            if ahead:
                break
    finally:
        signal.signal(signal.SIGALRM, before)
    torch.testing.assert_close(seen, [model.layers[0].weight.grad])
