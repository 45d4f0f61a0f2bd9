"""Auto: phases begin once they fit into Gemini's own time and would have been repaid; verdicts are remembered."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiConfig
from gemini.launcher import auto
from gemini.launcher.auto import AutoPolicy, Trial
from gemini.launcher.auto_verdicts import Verdicts
from gemini.launcher.model_discovery import ModelDiscovery
from gemini.launcher.own_time import OwnTime
from gemini.planner.step_plan import UnplannableError
from gemini.runtime.interception import dispatch
from gemini.tune import machine_search


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_own_time_grows_with_the_program_and_not_with_itself() -> None:
    own = OwnTime()
    before = own.allowed_s
    with own.measure():
        burn(0.1)
    assert own.spent_s >= 0.8
    assert own.allowed_s - before < 0.01
    burn(0.2)
    assert own.allowed_s - before >= 0.009
    assert own.fits(1.0)
    assert not own.fits(1.5)
    own.add(own.seconds_left())
    assert not own.fits(0.1)


def test_a_phase_begins_once_the_calls_so_far_would_have_repaid_it() -> None:
    trial = Trial(calls=21, ms=20 * 100.0)
    assert not trial.has_repaid(3.0)
    trial.least_ms = 50.0
    assert trial.has_repaid(1.0)
    assert not trial.has_repaid(1.1)


class Twelve(nn.Module):
    """A step that takes longer than the shortest one that is examined."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        burn(0.025)
        return self.inner(x)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AutoPolicy:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "count_workers", lambda _: 2)
    made = AutoPolicy(GeminiConfig(quiet=True, run_folder=str(tmp_path / "run")))
    made.discovery = ModelDiscovery(made)
    return made


def test_a_run_of_twelve_steps_is_left_alone(policy: AutoPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    backward = torch.autograd.backward
    monkeypatch.setattr(AutoPolicy, "_examine", lambda *given: begun.append(given) or False)
    monkeypatch.setattr(Trial, "has_repaid", lambda *_: True)
    model = Twelve()
    policy.discovery.register_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    try:
        for step in range(14):
            model(torch.ones(2, 4)).sum().backward()
            assert bool(begun) == (step > 12), step
    finally:
        policy.discovery.stop_watching()
    assert torch.autograd.backward is backward
    assert len(begun) == 1


class Wide(nn.Module):
    """One large layer that no pipeline can cut, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(1024, 2048), nn.Linear(2048, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.relu(self.large(x)))


def test_the_configuration_that_the_search_prefers_is_planned_and_started(
    policy: AutoPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(AutoPolicy, "start", lambda *given: started.append(given[1:]) or False)
    policy.config = GeminiConfig(quiet=True, pipeline_degree=2, accum_degree=4)
    model, batch = Wide(), torch.randn(64, 1024)
    trial = Trial(calls=20, ms=19e3, least_ms=1.0)
    assert policy._examine(model, trial, (batch,), {}) is None  # the first plan, and the search
    assert trial.plan is None
    assert trial.config is not None
    assert trial.config != policy.config
    assert policy._examine(model, trial, (batch,), {}) is None  # the plan of the choice
    assert trial.plan is not None
    assert policy._examine(model, trial, (batch,), {}) is False  # workers
    ((model_, plan, _, _, config, choice),) = started
    assert model_ is model
    assert plan is trial.plan
    assert config.replicas == 2 or config.sharding_size == 2
    assert any(line.startswith("pipeline: ") for line in choice[1:])


CHOICES = (
    {"mode": "sharding", "sharding_size": 2},
    {"mode": "hybrid", "pipeline_degree": 2, "sharding_size": 2, "accum_degree": 4},
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", CHOICES, ids=lambda one: one["mode"])
def test_shards_that_the_search_prefers_train_the_model(
    policy: AutoPolicy, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The choice is planned, installed, run and explained, with the numbers of this process."""
    policy.config = GeminiConfig(quiet=True, pipeline_degree=2, accum_degree=4, run_folder=policy.config.run_folder)
    chosen = GeminiConfig(quiet=True, run_folder=policy.config.run_folder, **settings)
    monkeypatch.setattr(machine_search, "choose_for_run", lambda *_: (chosen, [f"{settings['mode']}: 1 ms"]))
    torch.manual_seed(0)
    model, batch = Wide().double(), torch.randn(64, 1024).double()
    wanted = copy.deepcopy(model)
    trial = Trial(calls=20, ms=19e5, least_ms=1.0, wall_ms=19e5)
    assert [policy._examine(model, trial, (batch,), {}) for _ in range(3)] == [None, None, True]
    policy.discovery.settle(model, managed=True)
    losses = []
    for one in (model, wanted):
        optimizer = torch.optim.SGD(one.parameters(), 1e-3)
        for _ in range(4):
            loss = one(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-12)
    managed = dispatch.find_managed(model)
    assert "2 shards" in managed.journal.plan
    assert managed.journal.choice == [f"{settings['mode']}: 1 ms"]
    assert managed.journal.steps["overlapped"] >= 2
    managed.pool.stop()


def test_the_planned_pipeline_replaces_a_choice_without_a_plan(
    policy: AutoPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.config = GeminiConfig(quiet=True, pipeline_degree=2, accum_degree=4)
    chosen = GeminiConfig(quiet=True, mode="sharding", sharding_size=2)
    monkeypatch.setattr(machine_search, "choose_for_run", lambda *_: (chosen, ["sharding: 1 ms"]))
    model, batch = Wide(), torch.randn(64, 1024)
    first = policy._plan

    def plan(*given: Any) -> Any:
        if given[-1] is chosen:
            raise UnplannableError("it loops over samples")
        return first(*given)

    monkeypatch.setattr(policy, "_plan", plan)
    trial = Trial(calls=20, ms=19e5, least_ms=1.0)
    assert [policy._examine(model, trial, (batch,), {}) for _ in range(2)] == [None, None]
    assert trial.plan is trial.first
    assert trial.config is policy.config
    assert trial.choice == ["sharding: 1 ms", "sharding has no plan: it loops over samples"]


def test_what_stays_local_is_remembered_for_steps_of_that_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = GeminiConfig(quiet=True)
    Verdicts(config).store(nn.Linear(2, 3), 100.0, "too short")
    assert Verdicts(config).find(nn.Linear(2, 3), 105.0) == "too short"
    assert not Verdicts(config).find(nn.Linear(2, 3), 400.0)
    assert not Verdicts(config).find(nn.Linear(3, 3), 100.0)
    next((tmp_path / "gemini" / "verdicts").glob("*.json")).write_text("[1]", encoding="utf-8")
    assert not Verdicts(config).find(nn.Linear(2, 3), 100.0)
