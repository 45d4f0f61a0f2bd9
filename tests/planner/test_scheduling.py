"""Choosing: what a worker does around an action counts, so that small models are not cut into many stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.partition import partition
from gemini.partition.analysis import analyse
from gemini.partition.options import Options
from gemini.planner.scheduling import _ACTION_MS, around, choose
from gemini.profiling import profile


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_a_step_has_what_is_done_around_its_actions(schedule: str) -> None:
    batch = torch.randn(1, 64)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    options = Options(micro_batches=4)
    straight = partition(graph, costs, 2, "exact", Options(micro_batches=4, mixed=False))
    choice = choose(graph, costs, [straight], options, schedule)
    simulated = analyse(graph, costs, straight, Options(micro_batches=4, schedule=schedule))
    actions = max(len(choice.plan.device_blocks(at)) for at in range(2))
    extra = around(choice.plan, graph)
    assert extra > _ACTION_MS * actions  # the program's own process has its part, too
    assert choice.analysis.step_ms == pytest.approx(simulated.step_ms + extra)
