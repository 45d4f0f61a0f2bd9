"""After Ctrl-C at any point the program can continue with the numbers of one device."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_pool import WorkerPool

pytestmark = pytest.mark.usefixtures("trusted_tests")


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Whoever runs the tests in the background may have them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Part(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.batch = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.batch(torch.tanh(x @ self.weight)))


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 48)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def state_of(model: nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()


def put_back(model: nn.Module, optimizer: Any, state: Any) -> None:
    (weights, moments), drawn = copy.deepcopy(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    torch.set_rng_state(drawn)


ARMED = threading.Event()


def interrupted(work: Any, seconds: float) -> bool:
    """Run something, with one interrupt some time after its begin; whether that struck."""
    try:
        try:
            ARMED.set()
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        finally:
            ARMED.clear()
    except KeyboardInterrupt:
        ARMED.clear()
        return True
    signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def strike(*_: Any) -> None:
    if ARMED.is_set():
        raise KeyboardInterrupt


@pytest.fixture
def alarm() -> Any:
    """The timer's signal acts as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("times", [25, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("alarm")
def test_interrupts_at_random_points_change_nothing(times: int, pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Part() for _ in range(4)))
    local = copy.deepcopy(model)
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    ours, theirs = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.Adam(local.parameters(), 1e-3)
    for _ in range(3):
        drawn = torch.get_rng_state()
        step(model, ours)
        torch.set_rng_state(drawn)
        step(local, theirs)
    began = time.perf_counter()
    step(copy.deepcopy(local), copy.deepcopy(theirs))
    points = random.Random(1)
    length = max(0.02, 3 * (time.perf_counter() - began))
    struck = 0
    for _ in range(times):
        before = state_of(model, ours)
        while interrupted(lambda: step(model, ours), points.uniform(1e-4, length)):
            struck += 1
            put_back(model, ours, before)
        drawn = torch.get_rng_state()
        torch.set_rng_state(before[1])
        step(local, theirs)
        assert torch.equal(drawn, torch.get_rng_state())
    assert struck
    assert not pool.loss
    assert not managed.demotions
    assert all(not worker.mailbox.replies for worker in pool.workers)
    for one, other in zip(model.state_dict().values(), local.state_dict().values(), strict=True):
        assert torch.equal(one, other)


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.owner = nn.Parameter(torch.ones(32)), os.getpid()

    def forward(self, x: torch.Tensor, seconds: float = 0.0) -> torch.Tensor:
        if os.getpid() != self.owner:
            time.sleep(seconds)
        return x * self.weight


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Sleeps() for _ in range(4))

    def forward(self, x: torch.Tensor, seconds: float = 0.0) -> torch.Tensor:
        for part in self.parts:
            x = part(x, seconds)
        return x


def test_a_second_interrupt_does_not_wait(capsys: Any) -> None:
    pool = WorkerPool(2, 1)
    model = Asks()
    dispatch.manage(model, ManagedModel(model, pool))
    for _ in range(3):
        model(torch.ones(2, 32))
    capsys.readouterr()

    def press() -> None:
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    began = time.monotonic()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 32), 100.0)
    thread.join()
    assert time.monotonic() - began < 50  # of the 100 that one unit takes
    assert torch.equal(model(torch.ones(2, 32)), torch.ones(2, 32))
    model(torch.ones(2, 32)).sum().backward()
    assert capsys.readouterr().err.count("interrupted") == 1


def interrupt_in_a_block(seen: list[int]) -> None:
    with DeferredSignals():
        signal.raise_signal(signal.SIGINT)
        seen.append(0)


def test_signals_wait_for_the_end_of_a_block_and_handlers_come_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with DeferredSignals(), DeferredSignals():
            signal.raise_signal(signal.SIGUSR1)
            assert not seen
        assert seen == [signal.SIGUSR1]
        with pytest.raises(KeyboardInterrupt):
            interrupt_in_a_block(seen)
        assert seen == [signal.SIGUSR1, 0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, before)
