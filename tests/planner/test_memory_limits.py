"""A plan fits the memory of the workers: "auto" picks another one, a requested one is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import InvalidPlanError
from gemini.planner import step_planner
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import StepPlan, UnplannableError
from gemini.planner.step_planner import plan_step
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.profile_result import Profile

SIDE, LAYERS, SAMPLES, PIECES = 256, 8, 512, 4


def planned(limit_mb: float | None, schedule: str = "auto") -> StepPlan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU()) for _ in range(LAYERS)))
    wish = PlanRequest(2, PIECES, schedule=schedule, memory_limit_mb=limit_mb, cache=False)
    return plan_step(model, (torch.randn(SAMPLES, SIDE),), {}, wish)


def deep(limit_mb: float | None) -> StepPlan:
    """A model whose first stage keeps much more than its last, under a schedule that keeps all of it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Tanh()) for _ in range(12)]
    wish = PlanRequest(2, 8, schedule="gpipe", memory_limit_mb=limit_mb, cache=False)
    return plan_step(nn.Sequential(*blocks, nn.Linear(32, 2)), (torch.randn(8192, 32),), {}, wish)


def needed(plan: StepPlan) -> float:
    return max(worker.memory.total_mb for worker in plan.analysis.workers)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are the same on every machine: by the measured ones layers are dealt out, and so is their memory."""
    measured = step_planner.profile_micro_batch

    def timed(cost: NodeCost) -> NodeCost:
        forward_ms, backward_ms = {"0": (1.0, 2.0), "1": (0.3, 0.3)}.get(cost.name[-1], (0.0, 0.0))  # linear, GELU
        return replace(cost, forward_ms=forward_ms, backward_ms=backward_ms)

    def profiled(*given: Any) -> Profile:
        found = measured(*given)
        return replace(found, nodes=tuple(map(timed, found.nodes)))

    monkeypatch.setattr(step_planner, "profile_micro_batch", profiled)


@pytest.mark.usefixtures("steady")
def test_a_schedule_that_does_not_fit_is_refused_and_auto_takes_another() -> None:
    most, least = needed(planned(None, "gpipe")), needed(planned(None, "1f1b"))
    assert least < most
    limit = 1.01 * least
    with pytest.raises(InvalidPlanError, match=rf"gpipe with 4 micro-batches needs \d+\.\d MB in worker \d, memory_limit is {limit:.1f} MB\n    → schedule='auto'"):  # fmt: skip  # noqa: E501
        planned(limit, "gpipe")
    assert needed(planned(limit)) <= limit
    assert needed(planned(limit, "1f1b")) <= limit


def test_where_nothing_fits_there_is_no_plan() -> None:
    with pytest.raises(UnplannableError, match=r"it does not fit into the workers: at best it needs .* memory_limit is 1\.0 MB"):  # fmt: skip  # noqa: E501
        planned(1.0)


def test_the_optimizer_s_state_is_not_a_worker_s() -> None:
    plan = planned(None)
    assert all(worker.memory.optimizer_mb == 0 for worker in plan.analysis.workers)


def test_for_want_of_memory_activations_are_computed_again() -> None:
    usual = deep(None)
    assert not usual.recompute
    assert "computed again" not in str(usual)
    limit = 0.85 * needed(usual)
    found = deep(limit)
    assert found.recompute
    assert "activations recomputed in backward" in str(found)
    assert needed(found) <= limit
    assert found.step_ms > usual.step_ms * 0.9  # which takes time
