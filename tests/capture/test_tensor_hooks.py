"""Gradients computed by capture do not call the user's tensor hooks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.capture import capture
from gemini.capture.module_hooks import without_tensor_hooks


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(checkpoint(self.one, x, use_reentrant=True))


def test_hooks_are_silent_inside_and_there_again_afterwards() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[str] = []
    first = weight.register_hook(lambda _: seen.append("first"))
    weight.register_hook(lambda _: seen.append("second"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    with without_tensor_hooks([weight]):
        weight.sum().backward()
        weight.register_hook(lambda _: seen.append("third"))
    assert seen == []
    weight.sum().backward()
    assert seen == ["first", "second", "third", "accumulated"]
    first.remove()
    seen.clear()
    weight.sum().backward()
    assert seen == ["second", "third", "accumulated"]


def test_a_capture_calls_no_hook_of_parameters() -> None:
    for model in (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), Checkpointed()):
        seen: list[torch.Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(seen.append)
            parameter.register_post_accumulate_grad_hook(seen.append)
        capture(model, (torch.randn(2, 4, requires_grad=True),), {})
        assert seen == []
