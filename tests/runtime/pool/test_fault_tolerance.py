"""Under `gemini_python` a model whose worker is lost continues locally with the same results."""

from __future__ import annotations

import copy
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiConfig
from gemini.planner.config_planner import planner_for
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.session import start
from tests.runtime.pool.test_lost_workers import acting, inputs

pytestmark = pytest.mark.usefixtures("trusted_tests")


@pytest.mark.parametrize("when", [1, 2])
def test_a_call_whose_worker_dies_is_made_here(when: int, capsys: Any) -> None:
    model, managed, _ = acting("kill", quiet=False)
    managed.record.survives = True
    expected = copy.deepcopy(model)
    result, wanted = model(inputs(when)), expected(inputs(when))
    result.sum().backward()
    wanted.sum().backward()
    assert torch.equal(result, wanted)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    model(inputs(0)).sum().backward()
    assert "was killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize("act", ["kill", "crash"])
def test_a_lost_worker_is_one_line_and_its_stacks_are_a_file(act: str, tmp_path: Path, capsys: Any) -> None:
    """Also where backward of modules before the lost one runs in this process, because of it."""
    model, managed, _ = acting(act, quiet=False)
    managed.record.survives, managed.record.folder = True, tmp_path / "failures"
    capsys.readouterr()
    for when in (2, 0):
        model(inputs(when)).sum().backward()
    (line,) = capsys.readouterr().err.splitlines()
    assert "Sequential runs in this process from now on: worker 1 (process" in line
    assert "; its last action: backward of " in line
    assert "; it held " in line
    found = [*(tmp_path / "failures").glob("worker-*.txt")]
    assert len(found) == (act == "crash")
    for path in found:
        assert str(path) in line
        assert "in perform" in path.read_text()


def train(model: nn.Module, before: Any = None) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if before is not None:
            before(step)
        x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_steps_by_a_plan_go_on_here(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 3))
    expected = train(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, run_folder=str(tmp_path))
    managed = start(model, config, planner_for(config), announce=False, survives=True)
    assert managed is not None
    assert managed.pipelined is not None
    workers = list(managed.pool.workers)

    def kill(step: int) -> None:
        if step == 5:
            os.kill(workers[0].process.pid, signal.SIGKILL)

    found = train(model, kill)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 2
    said = capsys.readouterr().err
    assert said.count("runs in this process from now on") == 1
    held = r"it held stages? [\d, ]+ of Sequential \([\d.]+ .B planned\), [\d.]+ .B of memory at its peak"
    assert re.search(rf"worker 0 .* SIGKILL; .*; {held}; .* available now → .*--accum-degree", said), said


class Greedy(nn.Module):
    """Wants more memory than there is, once, in its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.owner = nn.Linear(32, 32), os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0].item() == 1 and os.getpid() != self.owner:
            torch.empty(1 << 60)
        return self.layer(x)


def test_memory_that_a_worker_has_not_got_may_be_here(capsys: Any) -> None:
    model = nn.Sequential(Greedy(), Greedy())
    managed = ManagedModel(model, WorkerPool(2, 1))
    managed.record.survives = True
    dispatch.manage(model, managed)
    for when in (0, 0, 0, 1, 1):
        expected = copy.deepcopy(model)(inputs(when))
        assert torch.equal(model(inputs(when)), expected)
    said = capsys.readouterr().err
    assert said.count("out of memory") == 1, said  # for both modules, in all calls
    assert re.search(
        r"out of memory in worker 0, forward of 0: 4611686.0 TB could not be allocated, "
        r"[\d.]+ .B of [^;]* available; smaller",
        said,
    )
    assert "InternalFault" not in said
