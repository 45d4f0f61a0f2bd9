"""Comparison of planned shards with one device: loss, and the gradients of all parameters."""

import torch

from gemini.tensor_parallel.shard_costs import ShardCosts
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.planned_models import opened
from tests.tensor_parallel.simulated_shards import SimulatedShards

SLOW = ShardCosts(latency_us=0.1, gflops=0.5)  # shards so slow that even tiny models are worth dividing


def compare(graph, plan, *args, tolerance=1e-9, **kwargs):
    """Assert that shards have the loss and the gradients of one device, with the same random numbers."""
    model = graph.bound_model()
    torch.manual_seed(3)
    shards = SimulatedShards(graph, plan)
    losses = [loss_of(out) for out in shards.run(*args, **kwargs)]
    torch.autograd.backward(losses)
    model.zero_grad()
    torch.manual_seed(3)
    expected = loss_of(model(*args, **kwargs))
    expected.backward()
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    found = shards.gradients()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = parameter.grad.abs().max().clamp(min=1e-3)
        for grad in found[name]:
            torch.testing.assert_close(grad / scale, parameter.grad / scale, rtol=tolerance, atol=tolerance)


def loss_of(out):
    """The loss of a result: its own, or a sum that gives every entry another gradient."""
    out = out if isinstance(out, torch.Tensor) else out["loss"]
    return out if out.ndim == 0 else (out * torch.arange(1, out.numel() + 1).reshape(out.shape).to(out)).sum()


def planned(model, *args, size=2):
    """Return the graph and plan of a model in float64, after a comparison with one device."""
    graph = opened(model.double(), *args)
    plan = plan_shards(graph, size, costs=SLOW)
    compare(graph, plan, *args)
    return graph, plan
