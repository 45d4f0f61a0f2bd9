"""The summary tells the memory of every worker, halves of shards included, and warns of large optimizer state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.memory_summary import memory_rows
from gemini.planner.config_planner import planner_for
from gemini.planner.shard_memory import estimate_workers
from gemini.planner.step_plan import StepPlan


@pytest.fixture(scope="module")
def plans() -> dict[str, StepPlan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8))
    made = {}
    for mode, values in (("pipeline", {"accum_degree": 2}), ("sharding", {"sharding_size": 2, "pipeline_degree": 1})):
        planner = planner_for(GeminiConfig(mode=mode, quiet=True, **{"pipeline_degree": 2, **values}))
        assert planner is not None
        made[mode] = planner(model, (torch.randn(8, 256),), {})
    return made


def test_every_worker_has_a_memory(plans: dict[str, StepPlan]) -> None:
    for plan in plans.values():
        found = estimate_workers(plan)
        assert len(found) == plan.nworkers == 2
        assert all(one.optimizer_mb == 0 for one in found), "it is in the process of the script"
        (name, text), *_ = memory_rows(plan, "SGD", 0.0)
        assert name == "memory"
        assert text.split(" MB")[0].count(" / ") == 1


def test_shards_hold_their_slices(plans: dict[str, StepPlan]) -> None:
    plan = plans["sharding"]
    whole = sum(one.numel() * 4 for one in plan.graph.bound_model().parameters()) / 1e6
    assert plan.shards is not None
    for one in estimate_workers(plan):
        assert 0.4 < one.weights_mb / whole < 0.65
        assert 0.4 < one.gradients_mb / whole < 0.65


def test_large_optimizer_state_is_a_warning(plans: dict[str, StepPlan]) -> None:
    plan = plans["pipeline"]
    largest = max(one.total_mb for one in estimate_workers(plan))
    assert len(memory_rows(plan, "SGD", 0.0)) == 1
    assert memory_rows(plan, "AdamW", 0.5 * largest)[1][0] == "[yellow]warning[/yellow]"
    assert memory_rows(plan, "AdamW", 0.1 * largest)[1][0] == ""
    weights = sum(one.numel() * 4 for one in plan.graph.bound_model().parameters()) / 1e6
    assert f"{2 * weights:.1f} MB of optimizer state (AdamW)" in memory_rows(plan, "AdamW", 0.0)[1][1]
