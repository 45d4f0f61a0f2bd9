"""A small model, its training step, and the comparison of a program on a plain and on a managed model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool

Wrap = Callable[[nn.Module], nn.Module]
Program = Callable[[Wrap], Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.batch = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch(x))


def batch(width: int = 16, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, width), torch.randint(0, classes, (12,))


def step(model: nn.Module, optimizer: Any) -> float:
    x, y = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return abs(one - other) <= tolerance * max(1.0, abs(one))
    return bool(one == other)


def check(program: Program, pool: WorkerPool, tolerance: float = 1e-5, elsewhere: bool = True) -> None:
    """The program gives what it gives on one device, draws as many random numbers, and uses workers."""
    known = []

    def manage(model: nn.Module) -> nn.Module:
        managed = ManagedModel(model, pool, quiet=True)
        dispatch.manage(model, managed)
        known.append(managed)
        return model

    torch.manual_seed(3)
    expected = program(lambda model: model)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    found = program(manage)
    assert equal(expected, found, tolerance)
    assert torch.equal(drawn, torch.get_rng_state()), "the generator is not where it would be"
    assert not sum(managed.record.demotions for managed in known), "something of ours failed"
    assert not elsewhere or sum(managed.calls for managed in known), "no unit ran in a worker"
