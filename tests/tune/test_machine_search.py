"""The search on this machine: costs per node, balanced cuts, shared processors, and what auto makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ProfileError
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.tune import ParallelConfig, tune
from gemini.tune.layer_cost import LayerCost
from gemini.tune.local_machine import local_cluster
from gemini.tune.machine_capture import capture_machine_costs, plan_costs
from gemini.tune.machine_costs import MachineCosts, NodeShare, NodeTime, balance_nodes, load_costs, save_costs
from gemini.tune.machine_search import FIXED, choose_for_run, machine_request
from gemini.tune.pipeline_run import PipelineRun, run_pipeline
from gemini.tune.shared_processors import share_processors
from gemini.tune.stage_costs import StageCost
from gemini.tune.step_pictures import PART_COLOURS
from gemini.tune.step_report import PART_NAMES
from gemini.tune.step_simulation import PARTS, simulate


def node(seconds: float, shares: bool = True) -> NodeTime:
    known = {2: NodeShare(0.5, 1e3, 2)} if shares else {}
    return NodeTime("n", (seconds / 4, seconds), (seconds / 2, 2 * seconds), 0.5, 1e4, 1e4, 1e4, 1e6, known)


def chain(seconds: list[float], shares: bool = True) -> MachineCosts:
    return MachineCosts("chain", tuple(node(one, shares) for one in seconds), (2, 8), 1e4, 0.05, 2e-4, 5e-3)


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=12), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_cuts_are_balanced(times, stages):
    stages = min(stages, len(times))
    kinds = tuple((LayerCost(forward=one, boundary=1.0), 1) for one in times)
    counts = balance_nodes(kinds, stages)
    assert sum(counts) == len(times)
    ends = [0, *accumulate(counts)]
    slowest = max(sum(times[begin:end]) for begin, end in pairwise(ends))
    assert slowest <= best_of_all_cuts(times, stages) * 1.0201


def best_of_all_cuts(times, stages):
    if stages == 1:
        return sum(times)
    return min(
        max(sum(times[:at]), best_of_all_cuts(times[at:], stages - 1)) for at in range(1, len(times) - stages + 2)
    )


def test_workers_take_turns_on_few_processors():
    config = ParallelConfig(devices=4, batch=8, pipeline=4)
    stages = [StageCost(1.0, 1.0, 1.0, {})] * 4
    free = run_pipeline(config, stages, 0.0)
    shared = share_processors(free, 2, 1)
    assert share_processors(free, 4, 1) is free
    assert max(free.seconds, sum(free.busy) / 2) <= shared.seconds <= 2 * free.seconds
    times = [share_processors(free, count, 1).seconds for count in (1, 2, 3, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(sum(free.busy))
    assert share_processors(replace(free, plan=None), 2, 1).seconds >= sum(free.busy) / 2
    assert share_processors(PipelineRun(3.0, (3.0,), (0.0,)), 2, 4).seconds == pytest.approx(6.0)


def test_costs_are_kept_as_a_file(tmp_path):
    costs = chain([0.1, 0.2])
    save_costs(costs, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == costs


def test_only_what_a_run_can_have_is_searched():
    found = tune(machine_request(chain([0.1] * 8), 4, 8))
    assert {one.config.kind for one in found.found} == {
        "one device", "pipeline", "sharding", "sharding with pipeline", "replicas", "replicas with pipeline",
    }  # fmt: skip
    undivided = tune(machine_request(chain([0.1] * 8, shares=False), 4, 8))
    assert not any(one.config.tensor > 1 for one in undivided.found)
    assert any("cannot be divided" in reason for reason in undivided.rejections.counts)


def test_a_smaller_micro_batch_costs_more_per_sample():
    costs = chain([0.1] * 8)
    one = simulate(costs, local_cluster(2), ParallelConfig(devices=2, batch=8, pipeline=2, micro_batch=4, **FIXED))
    two = simulate(costs, local_cluster(2), ParallelConfig(devices=2, batch=8, pipeline=2, micro_batch=1, **FIXED))
    assert two.parts["compute"] > one.parts["compute"]


class Wide(nn.Module):
    """One large layer, which no pipeline can cut, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(1024, 2048), nn.Linear(2048, 4)

    def forward(self, x):
        return self.small(torch.relu(self.large(x)))


def test_auto_chooses_what_the_search_finds():
    model, batch = Wide(), torch.randn(64, 1024)
    plan = plan_step(model, (batch,), {}, PlanRequest(2, 4, quiet=True, cache=False))
    config = GeminiConfig(pipeline_degree=2, accum_degree=4)
    chosen, lines = choose_for_run(plan, config, 0.05, None)
    result = tune(machine_request(plan_costs(plan, 2, 0.05), 2, 64))
    best = next(one for one in result.ranked if one.config.devices > 1)
    assert best.config.kind != "pipeline"
    assert chosen.replicas == 2 or chosen.sharding_size == 2
    assert chosen.worker_count == 2
    assert any(line.startswith("pipeline: ") for line in lines)


def test_every_part_of_a_step_has_a_name_and_a_colour():
    assert set(PARTS) == set(PART_NAMES) == set(PART_COLOURS)


def test_a_batch_that_must_stay_whole_is_not_split():
    found = tune(machine_request(replace(chain([0.1] * 8), coupled="statistics"), 2, 8))
    assert {one.config.micro_batch for one in found.found} == {8}
    assert any("statistics" in reason for reason in found.rejections.counts)


def test_a_model_without_gradients_is_refused():
    with pytest.raises(ProfileError, match="nothing to train"):
        capture_machine_costs(nn.Linear(2, 2).requires_grad_(False), (torch.ones(2, 2),))
