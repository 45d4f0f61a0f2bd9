"""Tensors that move into shared memory keep their properties in every autograd mode."""

from __future__ import annotations

import torch
from torch import nn

from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.memory.shared_layout import move_to_segment


def test_a_model_that_moves_in_during_an_evaluation_can_still_be_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    held = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    with torch.inference_mode():
        segment, homes = move_to_segment(held, Cpu())
    assert len(homes) == len(held)
    assert not any(tensor.is_inference() for tensor in held)
    assert all(torch.equal(now, was) for now, was in zip(held, before))
    model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    del model, held, segment
