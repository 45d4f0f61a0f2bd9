"""Analytic estimates have the same fields without running anything, and are exact where arithmetic is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.capture import capture
from gemini.errors import ProfileError
from gemini.profiling import SPECS, profile
from gemini.profiling.device_specs import DeviceSpec, find_spec, spec_like
from gemini.profiling.flop_count import KernelCounts, KernelWork
from gemini.profiling.roofline import calibrate, estimate_ms
from tests.profiling.models import CASES, Tied, tokens


@pytest.mark.parametrize("name", CASES)
def test_estimates_cover_every_node(name):
    model, args, kwargs = CASES[name]()
    graph = capture(model, args, kwargs)
    found = profile(graph, args, kwargs, analytic="h100")
    measured = profile(graph, args, kwargs, cache=False, rounds=1, check=False)
    assert (found.mode, found.device, found.check) == ("analytic", "h100", None)
    for estimate, real in zip(found, measured, strict=True):
        assert estimate.source == "analytic"
        assert (estimate.name, estimate.input_mb, estimate.parameter_mb) == (
            real.name,
            real.input_mb,
            real.parameter_mb,
        )
        assert (estimate.backward_ms > 0) >= (real.flops > real.forward_flops)


def test_a_model_on_the_meta_device_of_any_size():
    with torch.device("meta"):
        model = Tied(layers=3, width=8192, vocabulary=50_000)
        ids = torch.empty(4, 256, dtype=torch.int64)
    graph = capture(model, (ids,))
    found = profile(graph, (ids,), analytic="h200")
    up = found["layers.0.up"]
    flops = 3 * 2 * 4 * 256 * 8192 * 4 * 8192
    assert up.flops == pytest.approx(flops, rel=0.01)
    rate = SPECS["h200"].matrix_tflops["float32"] * 1e12 * SPECS["h200"].compute_efficiency
    assert up.ms == pytest.approx(flops / rate * 1e3, rel=0.05)
    assert found.parameter_mb() == pytest.approx(sum(p.numel() * 4 for p in model.parameters()) / 2**20)
    assert found.saved_mb() > 0
    assert next(model.parameters()).is_meta
    assert profile(graph).mode == "analytic"  # nothing can be measured of it


def test_meta_and_real_models_are_estimated_alike():
    real = profile(capture(Tied(), (tokens(),)), analytic="a100")
    with torch.device("meta"):
        model, ids = Tied(), torch.empty(4, 6, dtype=torch.int64)
    meta = profile(capture(model, (ids,)), analytic="a100")
    assert [cost.name for cost in real] == [cost.name for cost in meta]
    for one, other in zip(real, meta, strict=True):
        assert one.ms == pytest.approx(other.ms)
        assert one.saved_mb == pytest.approx(other.saved_mb)
        assert one.backward_peak_mb == pytest.approx(other.backward_peak_mb)


def test_faster_devices_are_never_slower():
    graph = capture(Tied(), (tokens(),))
    times = [profile(graph, analytic=name).forward_ms for name in ("h200", "h100", "a100", "v100", "t4")]
    assert times == sorted(times)


def test_half_precision_is_faster_on_matrix_units():
    x = torch.empty(4096, 4096, device="meta")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096))
    single = profile(capture(model, (x,)), analytic="h100")
    half = profile(capture(model.bfloat16(), (x.bfloat16(),)), analytic="h100")
    assert half.forward_ms < single.forward_ms / 4


def test_data_dependent_nodes_are_counted_on_real_values():
    class Chosen(nn.Module):
        def forward(self, x):
            return x[x.sum(1) > -1e9] * 2 if x.sum() > -1e9 else x

    model = nn.Sequential(nn.Linear(4, 4), Chosen(), nn.Linear(4, 4))
    found = profile(capture(model, (torch.randn(3, 4),)), analytic="h100")
    assert found["1"].reason == "analytic: h100"  # it ran once, to be counted
    assert found["2"].backward_ms > 0
    with torch.device("meta"):
        router = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert all(cost.flops for cost in profile(capture(router, (torch.empty(3, 4, device="meta"),)), analytic="h100"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_one_kernel_that_keeps_no_scores(device):
    def saved(length):
        with torch.device(device):
            model, x = Attention(), torch.zeros(1, length, 32)
        return profile(capture(model, (x,)), (x,), analytic="h100").saved_mb()

    assert saved(512) == pytest.approx(2 * saved(256), rel=0.05)


def test_unknown_descriptions_list_the_known():
    graph = capture(nn.Sequential(nn.ReLU()), (torch.ones(2),))
    with pytest.raises(ProfileError, match=r"did you mean 'h100'\?.*a100"):
        profile(graph, analytic="h10")


def test_descriptions_are_found_by_product_name():
    assert spec_like("cuda", "NVIDIA H200, CUDA 12.8") == find_spec("H200")
    assert spec_like("cuda", "NVIDIA A100-SXM4-80GB") == find_spec("a100")
    assert spec_like("cuda", "NVIDIA GeForce RTX 4090") == find_spec("rtx4090")
    assert spec_like("cpu", "anything") == find_spec("cpu")


kernels = st.builds(
    KernelWork, st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.integers(0, 10**12), st.integers(1, 10**9)
)


@settings(deadline=None)
@given(st.lists(kernels, max_size=5), st.sampled_from(sorted(SPECS)))
def test_times_add_up_and_are_positive(some, name):
    spec = SPECS[name]
    total = estimate_ms(KernelCounts(tuple(some)), spec)
    assert total == pytest.approx(sum(estimate_ms(KernelCounts((kernel,)), spec) for kernel in some))
    assert total >= 0
    assert (total > 0) == bool(some)


@settings(deadline=None)
@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.floats(0.5, 20.0))
def test_calibration_finds_the_device_that_made_the_times(compute, memory, kernel_us):
    truth = DeviceSpec("x", {"float32": 10.0}, 1.0, 500, kernel_us, compute, memory)
    guess = DeviceSpec("x", {"float32": 10.0}, 1.0, 500, 3.0)
    works = [
        KernelCounts((KernelWork("float32", True, 10**11, 10**5), KernelWork("float32", False, 0, 10**3))),
        KernelCounts((KernelWork("float32", False, 10, 10**9),)),
        KernelCounts((KernelWork("float32", False, 10, 10**7, 3),)),
        KernelCounts((KernelWork("float32", False, 1, 10, 50),)),
        KernelCounts((KernelWork("float32", True, 10**12, 10**6),)),
    ]
    found = calibrate(guess, [(work, estimate_ms(work, truth)) for work in works])
    assert found.calibrated
    for work in works:
        assert estimate_ms(work, found) == pytest.approx(estimate_ms(work, truth), rel=0.02)


def test_nothing_measured_calibrates_nothing():
    assert calibrate(SPECS["cpu"], []) == SPECS["cpu"]
    assert calibrate(SPECS["cpu"], [(KernelCounts(), 1.0)]) == SPECS["cpu"]


def test_a_device_at_hand_calibrates_the_description():
    graph = capture(Tied(), (tokens(),))
    found = profile(graph, analytic="cpu", device="cpu")
    assert "node classes on" in found.notes[0]
    assert found.mode == "analytic"
    with torch.device("meta"):
        model, ids = Tied(), torch.empty(4, 6, dtype=torch.int64)
    graph = capture(model, (ids,))
    for found in (profile(graph, analytic="cpu", device="cpu"), profile(graph, device="cpu")):
        assert found.notes[0].startswith("calibrated by probes on")
        assert found.mode == "analytic"
