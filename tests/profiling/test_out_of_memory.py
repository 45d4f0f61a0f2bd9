"""Nodes that exceed memory are estimated and marked; all others are measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.cpu_device import CpuDevice
from gemini.profiling.measured_device import MB, is_out_of_memory
from gemini.profiling.node_memory import LiveMemory


class Limited(LiveMemory):
    """Memory that ends."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def _count(self, key, storage):
        super()._count(key, storage)
        if self.live > self.limit * MB:
            raise torch.OutOfMemoryError(f"out of memory: {self.live} bytes")


class SmallDevice(CpuDevice):
    """A CPU on which a node may take so many MB."""

    limit = 1.0

    def watch(self):
        return Limited(self.limit)


class Hungry(nn.Module):
    """Runs out of memory wherever it runs, once it is told to."""

    full = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if self.full and not x.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return x * self.weight


def test_a_node_that_does_not_fit_is_estimated_and_marked():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4096), nn.Linear(4096, 16), nn.Linear(16, 16))
    graph = capture(model, (torch.randn(64, 16),))
    found = profile(graph, device=SmallDevice(), cache=False, rounds=1)
    assert [cost.source for cost in found] == ["measured", "analytic", "analytic", "measured"]
    assert found["1"].reason == "out of memory"
    assert found.mode == "measured"
    free = profile(graph, cache=False, rounds=1)
    for cost, real in zip(found, free, strict=True):
        assert cost.forward_ms > 0
        assert cost.backward_ms > 0
        assert cost.flops == pytest.approx(real.flops, rel=0.05)
        assert cost.saved_mb == pytest.approx(real.saved_mb)
        assert cost.backward_peak_mb == pytest.approx(real.backward_peak_mb, rel=0.3)


def test_a_forward_that_does_not_fit_leaves_the_nodes_after_it_measured():
    model = nn.Sequential(nn.Linear(8, 8), Hungry(), nn.Linear(8, 8))
    graph = capture(model, (torch.randn(4, 8),))
    model[1].full = True
    found = profile(graph, cache=False, rounds=1, check=False)
    assert [cost.source for cost in found] == ["measured", "analytic", "measured"]
    assert found["1"].parameter_mb == pytest.approx(32 / MB)


def test_estimates_are_not_cached(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4096))
    graph = capture(model, (torch.randn(64, 16),))
    profile(graph, device=SmallDevice(), cache=tmp_path, rounds=1)
    again = profile(graph, cache=tmp_path, rounds=1)
    assert {cost.source for cost in again} == {"measured"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_mean_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_real_allocation_that_is_too_large_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
