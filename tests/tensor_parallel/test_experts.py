"""Experts on shards: loops with rows that contents pick, batched products, and one reduction at hidden width."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.tensor_parallel.layouts import Shard
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.planned_models import opened
from tests.tensor_parallel.shard_comparison import compare

pytestmark = pytest.mark.unit

COUNT, WIDTH, INNER = 4, 64, 128


class Expert(nn.Module):
    """A gated layer."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Two experts of four for every row, and a residual stream."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT, bias=False)
        self.make()

    def forward(self, x):
        flat = x.flatten(0, 1) * 1.0
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        return flat + self.mix(flat, weights, chosen)


class Modules(Mixture):
    """A list of experts, each on its rows."""

    def make(self):
        self.experts = nn.ModuleList(Expert() for _ in range(COUNT))

    def mix(self, x, weights, chosen):
        made, mask = torch.zeros_like(x), F.one_hot(chosen, COUNT).permute(2, 1, 0)
        for at, expert in enumerate(self.experts):
            rank, row = torch.where(mask[at])
            made.index_add_(0, row, expert(x[row]) * weights[row, rank, None])
        return made


class Stacked(Mixture):
    """Stacked weights, of which a loop takes one expert at a time."""

    def make(self):
        self.up = nn.Parameter(torch.randn(COUNT, 2 * INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 8)

    def mix(self, x, weights, chosen):
        made, mask = torch.zeros_like(x), F.one_hot(chosen, COUNT).permute(2, 1, 0)
        for at in range(COUNT):
            rank, row = torch.where(mask[at])
            gate, up = F.linear(x[row], self.up[at]).chunk(2, -1)
            made.index_add_(0, row, F.linear(F.silu(gate) * up, self.down[at]) * weights[row, rank, None])
        return made


class Batched(Stacked):
    """Products of all experts with all rows."""

    def mix(self, x, weights, chosen):
        gate, up = torch.einsum("rk,enk->ern", x, self.up).chunk(2, -1)
        made = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2))
        return torch.einsum("erk,re->rk", made, weights.new_zeros(len(x), COUNT).scatter(1, chosen, weights))


@pytest.mark.parametrize("kind", [Modules, Stacked, Batched])
def test_experts_are_divided_with_one_reduction_at_hidden_width(kind):
    torch.manual_seed(0)
    x = torch.randn(6, 16, WIDTH).double()
    graph = opened(kind().double(), x)
    plan = plan_shards(graph, 2)
    assert plan.sharded_share > 0.9
    moved = Counter()
    for one in plan.collectives():
        if one.phase != "step":
            moved[one.phase] += one.wire / (x.nbytes / 2)
    assert max(moved.values()) <= 2.2, "an all-gather and a reduce-scatter"
    compare(graph, plan, x)


def test_rows_that_contents_pick_are_not_divided():
    graph = opened(Stacked().double(), torch.randn(6, 16, WIDTH).double())
    dynamic = {ref for node in graph.nodes for (source, path), meta in node.outputs.items() for ref in [node.id]
               if 0 in meta.dynamic_dims}  # fmt: skip
    assert dynamic
    for one in plan_shards(graph, 2).nodes:
        assert not [ref for ref, layout in one.outputs if ref.node in dynamic and isinstance(layout, Shard)
                    and layout.dim == 0]  # fmt: skip
