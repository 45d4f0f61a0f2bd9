"""Parameter hooks that draw random numbers draw them in program order; other hooks do not prevent pipelining."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage


def noisy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 0.1 * torch.randn_like(gradient)


def scaled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * random.random()


def calling(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * noisy(gradient)


class Noise:
    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand(gradient.shape)


def after(parameter: torch.Tensor) -> None:
    parameter.grad += torch.randn_like(parameter)


DRAWING: dict[str, Callable[[torch.Tensor], object]] = {
    "of torch": lambda one: one.register_hook(noisy),
    "of Python": lambda one: one.register_hook(scaled),
    "by another function": lambda one: one.register_hook(functools.partial(calling, factor=0.5)),
    "of an object": lambda one: one.register_hook(Noise()),
    "after accumulation": lambda one: one.register_post_accumulate_grad_hook(after),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()


def gradients(model: nn.Module, hook: Callable[[torch.Tensor], object], at: int) -> list[Any]:
    torch.manual_seed(1)
    random.seed(1)
    seen: list[Any] = []
    for step in range(6):
        if step == at:
            for parameter in model.parameters():
                hook(parameter)
        model.zero_grad()
        model(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()]
    return seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", DRAWING)
def test_they_draw_in_their_turn(name: str, at: int, pool: WorkerPool) -> None:
    expected = gradients(net(), DRAWING[name], at)
    model = net()
    manage(model, pool)
    torch.testing.assert_close(gradients(model, DRAWING[name], at), expected, rtol=1e-9, atol=1e-12)


def test_others_do_not_keep_steps_from_overlapping(pool: WorkerPool) -> None:
    def clamp(parameter: torch.Tensor) -> object:
        return parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    expected = gradients(net(), clamp, 0)
    model = net()
    story = manage(model, pool)
    torch.testing.assert_close(gradients(model, clamp, 0), expected, rtol=1e-9, atol=1e-12)
    assert story.steps["overlapped"] == 4, str(story)


def test_one_alone_has_no_turn(pool: WorkerPool) -> None:
    reference, model = net(), net()
    for one in (reference, model):
        one[0][0].weight.register_hook(noisy)
    expected = gradients(reference, lambda _: None, 0)
    story = manage(model, pool)
    torch.testing.assert_close(gradients(model, lambda _: None, 0), expected, rtol=1e-9, atol=1e-12)
    assert story.steps["overlapped"] == 4, str(story)
