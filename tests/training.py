"""Train a few steps and compare two trainings."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.ir.encode import tensors

Record = list[tuple[torch.Tensor, list[torch.Tensor | None]]]


@dataclass
class Trained:
    """What a training leaves: losses and gradients of every step, then the state."""

    record: Record
    state: dict[str, Any]
    names: list[str]


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


def trained(model: nn.Module, args: Any, kwargs: Any, optimizer: Any) -> Trained:
    """Three steps, and what they leave."""
    record = train(model, args, kwargs, optimizer=optimizer)
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if hasattr(value, "detach")}
    # Buffers that are not in the state dict count as well.
    state |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers() if name not in state}
    return Trained(record, state, [name for name, _ in model.named_parameters()])


def differences(one: Trained, other: Trained, first_gradients: bool = False) -> dict[str, float]:
    """Of everything that two trainings leave, by name, each relative to the largest entry of its own tensor.

    With `first_gradients` those of later steps do not count: rounding grows from step to step.
    """
    found: dict[str, float] = {}
    for step, ((loss, gradients), (loss2, gradients2)) in enumerate(zip(one.record, other.record, strict=True), 1):
        found[f"loss of step {step}"] = difference(loss, loss2)
        if step == 1 or not first_gradients:
            for name, a, b in zip(one.names, gradients, gradients2, strict=True):
                found[f"gradient of {name} in step {step}"] = difference(a, b)
    if one.state.keys() != other.state.keys():
        found[f"names {sorted(one.state.keys() ^ other.state.keys())[:3]}"] = float("inf")
        return found
    return found | {f"final {name}": difference(value, other.state[name]) for name, value in one.state.items()}


def difference(one: torch.Tensor | None, other: torch.Tensor | None, least: float = 0.0) -> float:
    """Of two tensors, relative to the largest entry, or `least` where that is more; infinite where one is missing."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not one.numel():
        return 0.0
    a, b = one.double() if not one.is_complex() else one, other.double() if not other.is_complex() else other
    unequal = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(unequal.any()):
        return 0.0
    a, b = a[unequal], b[unequal]
    if not bool((a.isfinite() & b.isfinite()).all()):
        return float("inf")
    whole = one[one.isfinite()].abs()
    return float((a - b).abs().max()) / max(float(whole.max()), least, sys.float_info.min)


def largest_difference(one: Record, other: Record) -> float:
    """Of losses and gradients, relative to the largest entry of each tensor."""
    pairs = [
        (a, b)
        for (loss, gradients), (loss2, gradients2) in zip(one, other, strict=True)
        for a, b in zip([loss, *gradients], [loss2, *gradients2], strict=True)
    ]
    return max(difference(a, b, 1e-6) for a, b in pairs)


def state_difference(one: nn.Module, other: nn.Module) -> float:
    """Of all weights and buffers."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    pairs = [(mine[key], theirs[key]) for key in mine if isinstance(mine[key], torch.Tensor)]
    return max((difference(a, b, 1.0) for a, b in pairs), default=0.0)
