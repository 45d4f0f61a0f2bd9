"""Training a few steps, and comparing two trainings."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.capture.values import tensors

Record = list[tuple[torch.Tensor, list[torch.Tensor | None]]]


def loss_of(output: Any) -> torch.Tensor:
    """The mean square of everything differentiable in an output."""
    parts = [t for _, t in tensors(output) if t.requires_grad and t.is_floating_point()]
    return torch.stack([part.double().pow(2).mean() for part in parts]).sum()


def train(model: nn.Module, args: Any, kwargs: Any, steps: int = 3, optimizer: Any = torch.optim.AdamW) -> Record:
    """Losses and gradients of some steps, with all generators seeded."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    made = optimizer(model.parameters(), 1e-2)
    seen: Record = []
    for _ in range(steps):
        made.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        seen.append((loss.detach().clone(), gradients))
        made.step()
    return seen


def largest_difference(one: Record, other: Record) -> float:
    """Of losses and gradients, relative to the largest entry of each tensor."""
    worst = 0.0
    for (loss, gradients), (loss2, gradients2) in zip(one, other, strict=True):
        for a, b in zip([loss, *gradients], [loss2, *gradients2], strict=True):
            assert (a is None) == (b is None), "a gradient is missing"
            if a is not None and b is not None and a.numel():
                scale = max(float(a.abs().max()), 1e-6)
                worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def state_difference(one: nn.Module, other: nn.Module) -> float:
    """Of all weights and buffers."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    pairs = [(mine[key], theirs[key]) for key in mine if isinstance(mine[key], torch.Tensor) and mine[key].numel()]
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs), default=0.0)
