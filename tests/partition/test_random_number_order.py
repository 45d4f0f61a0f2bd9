"""Parallel branches that draw random numbers are ordered in forward, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.partition import Options, Partition, analyse
from gemini.profiling import profile
from gemini.schedule.block import FORWARD


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
        self.other = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.one(x) + self.other(x))


@pytest.mark.parametrize("schedule", ["composed", "1f1b", "gpipe"])
def test_gradients_of_towers_do_not_wait_for_each_other(schedule: str) -> None:
    inputs = (torch.randn(8, 64),)
    graph = capture(Towers(), inputs)
    nodes = [node.id for node in graph.compute_nodes]
    assert len(nodes) == 6
    stages = (tuple(nodes[:2]), tuple(nodes[2:4]), tuple(nodes[4:]))
    made = Partition("Towers", "hand", 2, stages, (0, 1, 1))
    costs = profile(graph, inputs, {}, analytic="cpu")
    plan = analyse(graph, costs, made, Options(schedule=schedule, micro_batches=1)).plan
    assert plan is not None
    forward = {block.stage: plan.step(block) for block in plan if block.btype == FORWARD}
    backward = {block.stage: plan.step(block) for block in plan if block.btype != FORWARD}
    assert forward[0] < forward[1]
    assert backward[0] == backward[1] > backward[2]
