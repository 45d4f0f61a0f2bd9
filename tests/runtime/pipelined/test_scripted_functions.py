"""Deferred outputs work as inputs of scripted functions and function transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Gradients = list[torch.Tensor]


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).mean()


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(-1).tanh().mean()


def mapped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda one, other: (one * other).mean())(a, b).mean()


def pushed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(torch.sin, (a,), (b,))[1].mean()


def pulled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda one: (one.sin() * b).sum())(a).square().mean()


LOSSES: dict[str, Loss] = {
    "scripted": scripted, "scripted module": torch.jit.script(Product()), "vmap": mapped, "jvp": pushed, "grad": pulled,
}  # fmt: skip


def all_of(loss: torch.Tensor, parameters: Gradients) -> Gradients:
    return [*torch.autograd.grad(loss, parameters)]


def some(loss: torch.Tensor, parameters: Gradients) -> Gradients:
    loss.backward(inputs=parameters[:4])
    return [one.grad for one in parameters if one.grad is not None]


def twice(loss: torch.Tensor, parameters: Gradients) -> Gradients:
    loss.backward(retain_graph=True)
    loss.backward()
    return [one.grad for one in parameters]


def once(loss: torch.Tensor, parameters: Gradients) -> Gradients:
    loss.backward()
    return [one.grad for one in parameters]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "gradients", [once, all_of, *(pytest.param(one, marks=pytest.mark.slow) for one in (twice, some))]
)
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with another loss"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_go_through(name: str, is_alone: bool, gradients: Callable[..., Gradients], pool: WorkerPool) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()
    model = copy.deepcopy(reference)
    manage(model, pool)
    for _ in range(4):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
        found = []
        for one in (reference, model):
            one.zero_grad()
            output = one(x)
            loss = LOSSES[name](output, y) + (0 if is_alone else output.square().mean())
            found.append([loss.detach().clone(), *gradients(loss, [*one.parameters()])])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
