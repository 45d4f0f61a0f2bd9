"""The planned memory of a shard is that of its slices, and of what its generated code saves for backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.collectives.thread_group import run_shards
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.profiling.measured_device import MB
from gemini.tensor_parallel.local_graph import parameter_slice


class Block(nn.Module):
    """Attention and a wide layer, with a loss over a vocabulary."""

    def __init__(self, width=128, vocabulary=512):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        x = self.embed(ids)
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


def test_planned_memory_is_that_of_a_shard():
    torch.manual_seed(0)
    model, ids = Block(), torch.randint(512, (16, 64))
    plan = plan_step(model, (ids,), {}, PlanRequest(1, 1, shards=2, cache=False, quiet=True))
    planned, (stage,) = plan.analysis.workers[0].memory, plan.build().stages
    names = {id(one): name for name, one in model.named_parameters()}

    def measure(group):
        """Return the bytes of the slices, and of what is saved beside them."""
        own, leaves, saved = copy.deepcopy(stage), {}, {}
        for mine, theirs in zip(own.modules(), stage.modules(), strict=True):
            for name, whole in theirs._parameters.items():
                if whole is not None:
                    part = parameter_slice(whole.detach(), plan.shards.tensor(names[id(whole)]).layout, 2, group.rank)
                    mine._parameters[name] = leaves.setdefault(id(whole), nn.Parameter(part.clone()))
        skipped = {one.untyped_storage().data_ptr() for one in (*leaves.values(), ids)}

        def pack(tensor):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in skipped:
                saved[memory.data_ptr()] = memory.nbytes(), tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            own(ids)
        return sum(one.nbytes for one in leaves.values()), sum(size for size, _ in saved.values())

    weights, activations = run_shards(2, measure)[0]
    assert planned.weights_mb * MB == pytest.approx(weights, rel=0.01)
    assert planned.gradients_mb * MB == pytest.approx(weights, rel=0.01)
    assert planned.activations_mb * MB == pytest.approx(activations, rel=0.05)
