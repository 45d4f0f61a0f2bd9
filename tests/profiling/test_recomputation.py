"""Costs with recomputation, derived from those without, are those of a checkpointed layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.cpu_device import CpuDevice
from tests.profiling.models import Layer


class Stack(nn.Module):
    def __init__(self, width: int, recomputed: bool) -> None:
        super().__init__()
        self.layers, self.recomputed = nn.ModuleList(Layer(width) for _ in range(4)), recomputed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x.sum()


def profiles(width, batch, **options):
    for recomputed in (False, True):
        graph = capture(Stack(width, recomputed), (batch,), basic_blocks=("Layer",))
        yield profile(graph, (batch,), cache=False, device=CpuDevice(clock="cpu"), **options)


def test_memory_and_work_are_those_of_a_checkpointed_layer():
    batch = torch.randn(64, 32, requires_grad=True)
    kept, real = profiles(32, batch, rounds=1)
    derived = kept.with_recomputation()
    for index in range(4):
        one, other = derived[f"layers.{index}"], real[f"layers.{index}"]
        assert one.flops == pytest.approx(other.flops, rel=0.02)
        assert one.saved_mb == pytest.approx(other.saved_mb, rel=0.05)
        assert one.backward_peak_mb == pytest.approx(other.backward_peak_mb, rel=0.5)
        assert kept[f"layers.{index}"].saved_mb > 3 * one.saved_mb


@pytest.mark.slow
def test_time_is_that_of_a_checkpointed_layer():
    """In processor time, on layers large enough for Python not to matter."""
    batch = torch.randn(512, 256, requires_grad=True)
    kept, real = profiles(256, batch, rounds=5)
    derived = sum(cost.ms for cost in kept.with_recomputation() if cost.name.startswith("layers"))
    measured = sum(cost.ms for cost in real if cost.name.startswith("layers"))
    assert derived == pytest.approx(measured, rel=0.3)
