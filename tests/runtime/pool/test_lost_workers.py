"""A worker that dies or hangs is named with its last request, and the model continues locally."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import WorkerError
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool

pytestmark = pytest.mark.usefixtures("trusted_tests")


def started(pool: WorkerPool, model: nn.Module, **options: Any) -> tuple[nn.Module, ManagedModel]:
    """A managed model whose units are in their workers."""
    managed = ManagedModel(model, pool, **{"quiet": True, **options})
    dispatch.manage(model, managed)
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
    model.zero_grad()
    assert managed.calls
    return model, managed


class Acts(nn.Module):
    """Does to its worker what its input says: 1 in forward, 2 in backward."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.weight, self.act, self.owner = nn.Parameter(torch.eye(32)), act, os.getpid()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        when = 0 if os.getpid() == self.owner else x[0, 0].item()
        if when == 1:
            self.perform()
        y = x @ self.weight
        if when == 2:
            y.register_hook(lambda _: self.perform())
        return y

    def perform(self) -> None:
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "crash":
            os.abort()
        elif self.act == "leave":
            os._exit(7)
        elif self.act == "hang":
            asleep()


def asleep() -> None:
    time.sleep(1000)


def acting(act: str, timeout: float = 60.0, **options: Any) -> tuple[nn.Module, ManagedModel, WorkerPool]:
    pool = WorkerPool(2, 1)
    model = nn.Sequential(*(Acts(act) for _ in range(4)))
    made, managed = started(pool, model, **options)
    for worker in pool.workers:  # not before: the first calls of a process import much
        worker.timeout = timeout
    return made, managed, pool


def inputs(when: int) -> torch.Tensor:
    x = torch.zeros(4, 32)
    x[0, 0] = when
    return x


def are_gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("act", "text"), [("kill", "SIGKILL"), ("crash", "SIGABRT"), ("leave", "exited with code 7")])
@pytest.mark.parametrize(
    "when", [pytest.param(1, marks=pytest.mark.slow, id="forward"), pytest.param(2, id="backward")]
)
def test_a_worker_that_dies_is_named_and_the_model_goes_on_here(act: str, text: str, when: int, capsys: Any) -> None:
    model, _managed, pool = acting(act, quiet=False)
    pids = [worker.process.pid for worker in pool.workers]
    counts = [float(one.count) for one in model]
    with pytest.raises(WorkerError, match=text) as caught:
        model(inputs(when)).sum().backward()
    assert "worker 0" in str(caught.value) or "worker 1" in str(caught.value)
    assert ("forward of " if when == 1 else "backward of ") in str(caught.value)
    if act == "crash":
        assert "in perform" in str(caught.value)
    assert are_gone(pids)
    if when == 1:
        assert [float(one.count) for one in model] == [counts[0], *counts[1:]], "a buffer was written by half a call"
    capsys.readouterr()
    for _ in range(2):
        model(inputs(0)).sum().backward()
    assert capsys.readouterr().err.count("runs in this process from now on") == 1
    assert [float(one.count) for one in model] == [at + 2 + (when == 2) for at in counts]


def test_a_graph_of_a_lost_worker_is_differentiated_here() -> None:
    model, managed, pool = acting("kill")
    x = torch.randn(4, 32)
    x[0, 0] = 0
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    out = model(x)
    pool.workers[0].process.kill()
    with pytest.raises(WorkerError):
        model(x)
    counts = [float(one.count) for one in model]
    found = torch.autograd.grad(out.sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert counts == [float(one.count) for one in model]
    assert managed.demotions == 4


def test_a_worker_killed_between_steps_or_while_taking_a_model() -> None:
    model, managed, pool = acting("kill")
    pool.workers[1].process.kill()
    with pytest.raises(WorkerError, match=r"worker 1 .* SIGKILL; its last action"):
        model(inputs(0))
    pool = WorkerPool(2, 1)
    model = nn.Sequential(*(Acts("") for _ in range(4)))
    managed = ManagedModel(model, pool, quiet=True, strict=True)
    dispatch.manage(model, managed)
    model(torch.randn(8, 32))
    pool.workers[0].process.kill()
    for _ in range(3):
        with pytest.raises(WorkerError, match="SIGKILL"):
            model(torch.randn(8, 32))


def test_a_worker_killed_while_it_starts() -> None:
    before = set(os.listdir("/proc"))
    ended = threading.Event()

    def killer() -> None:
        mine = str(os.getpid())
        while not ended.is_set():
            for pid in set(os.listdir("/proc")) - before:
                try:
                    with open(f"/proc/{pid}/stat") as file:
                        parent = file.read().rpartition(")")[2].split()[1]
                    if parent == mine:
                        os.kill(int(pid), signal.SIGKILL)
                        return
                except (OSError, ValueError):
                    pass

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        with pytest.raises(WorkerError, match=r"SIGKILL; its last action: start"):
            WorkerPool(2, 1)
    finally:
        ended.set()
        thread.join()


def test_a_worker_that_hangs_is_shown_with_its_stacks() -> None:
    model, _managed, pool = acting("hang", 2.0)
    pids = [worker.process.pid for worker in pool.workers]
    with pytest.raises(WorkerError, match=r"did not reply for 2 s; its last action: forward of") as caught:
        model(inputs(1))
    assert "in asleep" in str(caught.value)
    assert "in perform" in str(caught.value)
    assert "watchdog" in str(caught.value)
    assert are_gone(pids)
    model(inputs(0)).sum().backward()


def test_a_stopped_worker_is_a_hanging_one() -> None:
    model, _managed, pool = acting("hang", 1.0)
    os.kill(pool.workers[0].process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="a signal has stopped its process"):
        model(inputs(0))


def test_the_watchdog_knows_how_long_a_unit_takes(pool: WorkerPool) -> None:
    _, managed = started(pool, nn.Sequential(*(Acts("") for _ in range(4))))
    unit = next(iter(managed.remote_modules.values()))
    assert unit.timeout == pytest.approx(10 * managed.traces[unit.number].ms / 1e3)
