"""Parameters may be frozen and trained alternately, shared or not; their hooks see each gradient once."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal

STEPS = 10


class Tied(nn.Module):
    """Six layers, of which two share a weight; `skip` leaves out one of those."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[4].weight = self.layers[0].weight
        self.skip: int = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            if at != self.skip:
                x = x + torch.tanh(layer(x))
        return x


def managed(model: nn.Module, pool: WorkerPool, micro_batches: int, overlapped: bool = False) -> ManagedModel:
    made = ManagedModel(model, pool, quiet=True, micro_batches=micro_batches, strict=True)
    if overlapped:
        wish = PlanRequest(len(pool.workers), micro_batches, cache=False)
        story = ModelJournal(type(model).__name__, len(pool.workers))
        made.pipelined = PipelinedModel(
            made, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
        )
    dispatch.manage(model, made)
    return made


def train(model: Tied, seed: int, skips: bool) -> list[Any]:
    """Losses, gradients and what hooks see, with some parameters frozen in every step."""
    chance = random.Random(seed)
    seen: list[Any] = []
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.requires_grad_(chance.random() < 0.6)
        model.layers[5].bias.requires_grad_()
        hooked = chance.choice([p for p in model.parameters() if p.requires_grad])
        handle = hooked.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient * 0.5)  # noqa: B023
        model.skip = chance.choice([-1, 0, 4]) if skips else -1
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.roll(1, 0))
        loss.backward()
        optimizer.step()
        handle.remove()
        seen += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("way", ["calls", "micro-batches", "plans"])
def test_any_may_be_frozen_in_any_step(way: str, seed: int, pool: WorkerPool) -> None:
    torch.manual_seed(seed)
    model = Tied()
    reference = copy.deepcopy(model)
    expected = train(reference, seed, skips=way == "calls")
    managed(model, pool, 1 if way == "calls" else 4, overlapped=way == "plans")
    found = train(model, seed, skips=way == "calls")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_frozen_after_a_call_whose_backward_is_to_come(micro_batches: int, pool: WorkerPool) -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    managed(model, pool, micro_batches)
    x = torch.randn(8, 8)
    for one in (reference, model):
        for _ in range(3):
            one.zero_grad()
            first = one(x)
            one.layers[1].weight.requires_grad_(False)
            one.layers[0].weight.requires_grad_(False)
            second = one(x)
            one.layers[1].weight.requires_grad_()
            (first.square().sum() + second.square().sum()).backward()
            one.layers[0].weight.requires_grad_()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_hooks_see_gradients_once_also_where_they_are_differentiated(micro_batches: int, pool: WorkerPool) -> None:
    model = Tied().double()
    reference = copy.deepcopy(model)
    managed(model, pool, micro_batches)
    x = torch.randn(8, 8, dtype=torch.float64)
    counts = []
    for one in (reference, model):
        seen: list[torch.Tensor] = []
        for _ in range(3):
            handle = one.layers[0].weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.detach()))
            loss = one(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, one.layers[0].weight, create_graph=True)
            gradient.square().sum().backward()
            handle.remove()
        counts.append(seen)
    torch.testing.assert_close(counts[1], counts[0])


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_of_any_order_with_shared_weights(micro_batches: int, pool: WorkerPool) -> None:
    model = Tied().double()
    reference = copy.deepcopy(model)
    managed(model, pool, micro_batches)
    start = torch.randn(4, 8, dtype=torch.float64)
    found = []
    for one in (reference, model):
        for _ in range(3):
            x = (start + one.layers[0].weight.sum(0)).requires_grad_()  # a weight of the model is in its input, too
            orders: list[torch.Tensor] = [one(one(x)).pow(2).sum()]
            for _ in range(3):
                gradients = torch.autograd.grad(orders[-1], [x, *one.parameters()], create_graph=True)
                orders.append(torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().sqrt())
        found.append([order.detach() for order in orders])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)
