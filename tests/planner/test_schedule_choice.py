"""Schedule choice counts the overhead per action, so that small models are not cut into many stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.partition import partition
from gemini.partition.analysis.analysis_builder import analyse
from gemini.partition.partition_options import Options
from gemini.planner.schedule_choice import choose_schedule, step_overhead_ms
from gemini.profiling import profile
from gemini.schedule.block import INPUT_GRADIENT
from gemini.schedule.link_costs import Links


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_a_step_has_what_is_done_around_its_actions(schedule: str) -> None:
    batch = torch.randn(1, 64)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    options = Options(micro_batches=4, action_ms=0.2)
    straight = partition(graph, costs, 2, "exact", Options(micro_batches=4, mixed=False))
    choice = choose_schedule(graph, costs, [straight], options, schedule)
    simulated = analyse(graph, costs, straight, Options(micro_batches=4, schedule=schedule))
    whole = choice.analysis.step_ms - step_overhead_ms(graph)  # the program's own process has its part, too
    assert whole == pytest.approx(analyse(graph, costs, straight, replace(options, schedule=schedule)).step_ms)
    assert whole >= simulated.step_ms + 2 * 4 * 0.2  # a forward and a backward of four micro-batches


def test_who_sends_is_busy_with_it() -> None:
    batch = torch.randn(256, 256)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)))
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    straight = partition(graph, costs, 2, "exact", Options(micro_batches=4, mixed=False))
    free, paid = (analyse(graph, costs, straight, Options(micro_batches=4, sending_ms=ms)) for ms in (0.0, 8.0))
    (flow,) = free.flows
    assert flow.forward_mb == flow.backward_mb == 0.25
    for before, after in zip(free.stages, paid.stages, strict=True):
        sent = flow.forward_mb if before.stage == flow.source else flow.backward_mb
        assert after.ms == pytest.approx(before.ms + sent * 8.0)


def test_a_measured_share_of_weights_decides_when_input_gradients_are_there() -> None:
    batch = torch.randn(2, 64)
    graph = capture(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    straight = partition(graph, costs, 2, "exact", Options(micro_batches=4, mixed=False))
    most = replace(costs, nodes=tuple(replace(cost, weight_share=0.9) for cost in costs))
    options = Options(micro_batches=4, schedule="zb_h1")
    plans = [analyse(graph, one, straight, options).plan for one in (costs, most)]
    early, late = ({block.span for block in plan if block.btype == INPUT_GRADIENT} for plan in plans if plan)
    assert max(late) < min(early)


def test_small_equal_blocks_are_shared_evenly() -> None:
    """Values on their way keep no worker busy: their latency moves no work to the worker that sends them."""
    batch = torch.randn(8, 64)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    equal = replace(costs, nodes=tuple(replace(cost, forward_ms=0.1, backward_ms=0.1) for cost in costs))
    links = Links(latency=0.1, bandwidth=4e6)
    found = partition(graph, equal, 2, "exact", Options(micro_batches=4, links=links, sending_ms=0.25, mixed=False))
    assert [len(stage) for stage in found.stages] == [4, 4]
