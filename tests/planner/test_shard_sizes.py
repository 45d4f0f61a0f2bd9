"""One divided plan for all lengths: layouts of the second length divide no dimension that varies."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.planner.plan_request import PlanRequest
from gemini.planner.resized_plan import PlanPair
from gemini.planner.step_planner import plan_step
from gemini.tensor_parallel.layouts import Shard

WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def divided_lengths(plan):
    """How many values a plan divides along their second dimension, which is that of the length."""
    layouts = [
        layout for one in plan.shards.nodes for ref, layout in one.outputs if len(plan.graph.meta(ref).shape) == 3
    ]
    return sum(isinstance(layout, Shard) and layout.dim == 1 for layout in layouts)


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layouts_of_the_second_length_serve_all(micro_batches):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    request = PlanRequest(1, micro_batches, shards=2, quiet=True, cache=False)
    calls = [(torch.randn(8, length, WIDTH),) for length in (64, 50, 33)]
    first = plan_step(model, calls[0], {}, request)
    assert divided_lengths(first) > 0  # or nothing is shown below
    second = plan_step(model, calls[1], {}, PlanRequest(**{**vars(request), "earlier_plans": (first,)}))
    assert second.shards is not None
    assert divided_lengths(second) == 0
    assert second.shards.sharded_share > 0.95
    shapes = [[tuple(one.shape) for one in call] for call in calls]
    pair = PlanPair.of(second, shapes[1], first, shapes[0])
    assert pair is not None
    assert pair.is_sound(model, (calls[2], {}), shapes[2])
    third = pair.resize(model, calls[2], {}, shapes[2])
    assert third is not None
    assert third.build().sources == second.build().sources
    assert [one.shape[1] for one in third.rng_patterns[0]] == [33, 33]
