"""A call that the pipelined path cannot make falls back to eager dispatch; no program fails because of it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.errors import WorkerError
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch
from gemini.runtime.pipelined import pipelined_model


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.lin(x))


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    told = []
    for _ in range(5):
        x, y = torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


def compiled(model: nn.Module, folder: Path) -> nn.Module:
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(folder))
    return GeminiCompiler().compiler(model, config=config)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_scripted_module_inside_is_no_failure(tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), torch.jit.script(Inner()), nn.Linear(8, 3))

    expected, model = train(made()), made()
    parallel = compiled(model, tmp_path)
    assert train(parallel) == pytest.approx(expected, rel=1e-6)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    ((kind,),) = managed.pipelined.plans.kinds.values()
    assert "compiled by torch.jit" in kind.reason


def test_a_failure_before_a_call_is_made_leads_to_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    expected = train(copy.deepcopy(model))
    parallel = compiled(model, tmp_path)

    def fail(*_: object) -> None:
        raise KeyError("something that nobody thought of")

    monkeypatch.setattr(pipelined_model, "read_contents", fail)
    assert train(parallel) == pytest.approx(expected, rel=1e-6)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert CallPath.OVERLAPPED not in managed.pipelined.journal.steps


def test_what_the_model_raises_is_raised_once(tmp_path: Path) -> None:
    parallel = compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), tmp_path)
    train(parallel)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        parallel(torch.randn(8, 5))


class Heads(nn.Module):
    """Two heads, one of which may be in a stage before that of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.a, self.b = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.shared(x)
        return self.a(hidden), self.b(hidden)


def read_after_backward(model: nn.Module) -> list[float]:
    generator, weights, told = torch.Generator().manual_seed(0), nn.Parameter(torch.ones(2)), []
    for step in range(6):
        a, b = model(torch.randn(8, 10, generator=generator))
        one, other = F.cross_entropy(a, torch.arange(8) % 3), b.square().mean()
        if step < 3:
            one.backward(retain_graph=True)
            other.backward()
        else:
            weighed = weights * torch.stack([one, other])
            weighed.sum().backward(retain_graph=True)
            told += [weighed[0].item(), weighed[1].item()]
    return told


def test_values_of_a_loss_are_read_where_it_ran_though_others_ran_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Heads()
    expected = read_after_backward(copy.deepcopy(model))
    assert read_after_backward(compiled(model, tmp_path)) == pytest.approx(expected, rel=1e-5)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 4


@pytest.mark.parametrize("changed", [False, True])
def test_values_that_went_with_their_workers_are_nobody_elses_trouble(tmp_path: Path, changed: bool) -> None:
    torch.manual_seed(0)
    model = Heads()
    parallel, optimizer = compiled(model, tmp_path), torch.optim.SGD(model.parameters(), 0.1)
    read_after_backward(parallel)
    x = torch.randn(8, 10)
    expected = [one.detach() for one in copy.deepcopy(model)(x)]
    a, b = parallel(x)
    (F.cross_entropy(a, torch.arange(8) % 3) + b.square().mean()).backward()
    if changed:
        optimizer.step()
    managed = dispatch.find_managed(model)
    assert managed is not None
    managed.pool.stop()
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert double(torch.ones(2)).tolist() == [2, 2]  # it looks at all calls that are not real yet
    if changed:
        with pytest.raises(WorkerError, match="has been stopped"):
            a.sum().item()
    else:
        torch.testing.assert_close([a.detach(), b.detach()], expected)


class Stubborn:
    def __reduce__(self) -> Any:
        raise TypeError("it stays where it is")


def test_stages_that_cannot_be_sent_fail_for_the_same_reason_each_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Inner(), nn.Linear(8, 3))
    expected = train(copy.deepcopy(model))
    model[1].held = Stubborn()
    parallel = compiled(model, tmp_path)
    assert train(parallel) == pytest.approx(expected, rel=1e-6)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    failed = [reason for reason in managed.pipelined.journal.reasons if "Error" in reason]
    assert failed
    assert all("it stays where it is" in reason for reason in failed)


def test_zeros_of_another_sign_are_other_losses(tmp_path: Path) -> None:
    def told(model: nn.Module) -> list[float]:
        x, seen = torch.arange(24.0).reshape(8, 3), []
        for sign in (0.0, 0.0, 0.0, -0.0, 0.0, -0.0):  # the reciprocal of a zero tells its sign
            found = model(x)
            loss = (1.0 / torch.where(found < 1e9, sign, 1.0)).mean() + found.mean()
            loss.backward()
            seen.append(loss.item())
        return seen

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    expected = told(copy.deepcopy(model))
    assert expected[2:5] == [math.inf, -math.inf, math.inf]
    assert told(compiled(model, tmp_path)) == expected
