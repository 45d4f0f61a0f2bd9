"""A plan is replaced where measured steps are less balanced than predicted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.planner import step_planner
from gemini.profiling.profile_result import Profile
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined import measured_schedule, plan_table
from gemini.runtime.pipelined.call_signature import CallKind


class Sleeping(torch.autograd.Function):
    """Takes longer than anything else, and more than the profile of these tests says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Layer(nn.Module):
    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.sleeps = nn.Linear(96, 96), nn.Dropout(0.2), sleeps
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = self.dropout(self.linear(x).relu())
        return Sleeping.apply(x) if self.sleeps else x


class Net(nn.Module):
    """Its last two layers are slower than they seem; the first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(at >= 6) for at in range(8)))
        self.layers[7].linear.weight = self.layers[0].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(model: nn.Module, steps: int, between: Any = lambda: None) -> list[float]:
    """Losses of some steps, uneven batches among them, and of evaluation now and then."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        x = torch.randn(8 if step % 5 else 7, 96)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        between()
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                found.append(model(x).sum().item())
            model.train()
    found.append(torch.rand(()).item())
    return found


def compiled(folder: Path) -> tuple[nn.Module, ManagedModel]:
    torch.manual_seed(0)
    model = Net()
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule="1f1b", quiet=True, run_folder=str(folder)
    )
    GeminiCompiler().compiler(model, config)
    found = dispatch.find_managed(model)
    assert found is not None
    return model, found


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # kept plans are of this test only
    profiled = step_planner.profile_micro_batch

    def wrong(*asked: Any) -> Profile:
        """All nodes take the same: what is planned first does not depend on how busy this machine is."""
        found = profiled(*asked)
        return replace(found, nodes=tuple(replace(node, forward_ms=0.1, backward_ms=0.1) for node in found.nodes))

    monkeypatch.setattr(step_planner, "profile_micro_batch", wrong)
    model, found = compiled(tmp_path)
    yield model, found
    found.pool.stop()


def training_kind(managed: ManagedModel) -> CallKind | None:
    """The one whose plan users are told of."""
    assert managed.pipelined is not None
    known = managed.pipelined.plans
    return next((kind for kinds in known.kinds.values() for kind in kinds if kind.plan is known.reported), None)


@pytest.mark.slow
def test_work_goes_to_the_worker_that_waits_and_nothing_else_changes(
    managed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, here = managed
    monkeypatch.setattr(plan_table, "_LEAST_MS", 0.0)
    monkeypatch.setattr(measured_schedule, "_LAST", 2)
    seen: list[tuple[int, ...]] = []

    def between() -> None:
        kind = training_kind(here)
        if kind is not None and kind.plan is not None:
            kind.planning_ms = 0.0
            split = tuple(map(len, kind.plan.partition.stages))
            if split not in seen:
                seen.append(split)

    torch.manual_seed(0)
    alone = Net()
    expected, found = trained(alone, 14), trained(model, 14, between)
    assert found == pytest.approx(expected, rel=1e-4)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-3, atol=1e-5)
    kind = training_kind(here)
    assert kind is not None
    assert kind.changes >= 1
    assert len(seen) >= 2, seen
    assert here.pipelined.journal.steps.keys() <= {"overlapped", "local"}
    assert here.pipelined.steps >= 10
    assert not kind.failures
    assert here.pipelined.plans.reported is kind.plan
    # A later run begins with what this one has learned.
    again, there = compiled(tmp_path)
    try:
        trained(again, 2)
        later = training_kind(there)
        assert later is not None
        assert later.plan is not None
        assert later.plan.is_cached
        assert tuple(map(len, later.plan.partition.stages)) == seen[-1]
    finally:
        there.pool.stop()


@pytest.mark.slow
def test_where_it_fails_the_plan_stays(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, here = managed
    monkeypatch.setattr(plan_table, "_LEAST_MS", 0.0)
    monkeypatch.setattr(measured_schedule, "_LAST", 2)
    monkeypatch.setattr(measured_schedule, "imbalance_ms", lambda plan: 0.5 * plan.step_ms)
    plan = here.pipelined.plans.planner
    made: list[Any] = []

    def once(*call: Any, **changes: Any) -> Any:
        if changes.get("measured_plan") is not None:
            raise RuntimeError("not again")
        made.append(plan(*call, **changes))
        return made[-1]

    here.pipelined.plans.planner = once

    def between() -> None:
        kind = training_kind(here)
        if kind is not None:
            kind.planning_ms = 0.0

    torch.manual_seed(0)
    expected = trained(Net(), 8)
    assert trained(model, 8, between) == pytest.approx(expected, rel=1e-4)
    kind = training_kind(here)
    assert kind is not None
    assert kind.changes >= 1
    assert kind.plan is not None
    assert any(kind.plan.partition is one.partition for one in made)
