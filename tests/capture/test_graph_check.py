"""Graph verification accepts bitwise equality, rounding and the model's own nondeterminism, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.capture import capture
from gemini.capture.verify.gradient_record import autograd_graph_text, backward, digest, keep_gradient
from gemini.capture.verify.graph_check import GraphChecker
from gemini.ir.call_binding import ModelCall
from gemini.snapshot.model_state import ModelSnapshot

pytestmark = pytest.mark.usefixtures("trusted_tests")

RANDOM = np.random.default_rng(0)  # no generator of a model: nothing puts it back


class Noisy(nn.Module):
    """A kernel with atomic additions: each run gives a little else."""

    def __init__(self, size=1e-3):
        super().__init__()
        self.weight, self.size = nn.Parameter(torch.ones(8)), size

    def forward(self, x):
        noise = torch.from_numpy(RANDOM.standard_normal(x.shape)).float()
        return x * self.weight * (1 + self.size * noise)


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8)).train()


def test_the_models_own_noise_is_no_difference():
    graph = capture(model(Noisy()), (torch.randn(6, 8),))
    assert graph.blocks == {}
    assert len(graph.compute_nodes) == 3


def test_noise_that_drowns_everything_proves_nothing():
    graph = capture(model(Noisy(0.5)), (torch.randn(6, 8),))
    assert graph.is_whole
    assert "differ" in graph.blocks[""]


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_a_real_difference_is_seen_through_noise(noise):
    net, x = model(Noisy(noise)), torch.randn(6, 8)
    graph, call = capture(net, (x,)), ModelCall((x,), {})
    checks = GraphChecker(net, call, ModelSnapshot(net))
    assert not checks.differences("batch", graph, call.tensors, gradients=True)
    wrong = next(node for node in graph.nodes if node.target == "2")
    wrong.kind, wrong.target = "op", "torch.relu"
    found = checks.differences("batch", graph, call.tensors, gradients=True)
    assert found.forward
    assert any("off by" in line for line in found.lines)
    assert any("gradient of 2.weight: missing" in line for line in found.lines)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_a_wrong_gradient_is_seen_where_outputs_agree(noise):
    net, x = model(nn.Identity(), Noisy(noise)), torch.randn(6, 8)
    graph, call = capture(net, (x,)), ModelCall((x,), {})
    identity = next(node for node in graph.nodes if node.target == "1")
    identity.kind, identity.target = "op", "torch.Tensor.detach"
    for gradients in (True, False):  # by digest, and by the autograd graph
        found = GraphChecker(net, call, ModelSnapshot(net)).differences("batch", graph, call.tensors, gradients)
        assert not found.forward
        assert set(found.parameters) == {"0.weight", "0.bias"}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70_000), st.data())
def test_digests_tell_gradients_apart(size, data):
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(digest("", grad), digest("", grad.clone()))
    at = data.draw(st.integers(0, size - 1))
    other = grad.clone()
    other[at] += 1e-3
    assert not torch.equal(digest("", grad), digest("", other))
    swapped = grad.flip(0)
    assert size == 1 or torch.equal(grad, swapped) or not torch.equal(digest("", grad), digest("", swapped))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64])
def test_digests_of_any_dtype(dtype):
    value = torch.arange(20_000).to(dtype)
    assert torch.isfinite(digest("", value.clamp(max=9) if dtype == torch.int64 else value.sqrt())).all()
    sparse = torch.eye(200).to_sparse()
    assert torch.equal(digest("", sparse), digest("", torch.eye(200)))


def test_gradients_are_handed_over_one_by_one_and_hooks_of_the_user_do_not_run():
    net, x = model(), torch.randn(4, 8, requires_grad=True)
    seen = []
    net[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 3)
    output = net(x)
    found = backward(net, [output], [x], keep_gradient)
    assert set(found) == {*dict(net.named_parameters()), "input 0"}
    assert all(p.grad is None for p in net.parameters())
    plain = model()
    same = backward(plain, [plain(x)], [x], keep_gradient)
    torch.testing.assert_close(found["0.weight"], same["0.weight"])
    torch.testing.assert_close(found["input 0"], same["input 0"])
    assert not seen


def test_the_way_back_names_functions_settings_and_parameters():
    net, x = model(nn.Softmax(-1)), torch.randn(4, 8)
    text = autograd_graph_text(net, [net(x)], [x])
    assert text == autograd_graph_text(net, [net(x)], [x])
    assert "0.weight" in text
    assert "SoftmaxBackward0" in text
    assert text != autograd_graph_text(net, [net[2](torch.softmax(net[0](x), 0))], [x])
    assert text != autograd_graph_text(net, [net[2](torch.softmax(net[0](x).detach(), -1))], [x])
    assert text != autograd_graph_text(net, [net[0](torch.softmax(net[2](x), -1))], [x])


def test_large_models_are_checked_by_gradients_on_the_half_batch(monkeypatch):
    monkeypatch.setattr("gemini.capture.driver._THOROUGH_SECONDS", 0.0)
    graph = capture(model(nn.ReLU()), (torch.randn(6, 8),))
    assert graph.checked["half batch"] == "outputs, buffers, gradients"
    assert "same autograd graph" in graph.checked["batch"]
    assert len(graph.checked) == 3


def test_custom_backwards_that_differ_by_a_setting_are_told_apart():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor, None

    net, x = model(), torch.randn(4, 8)
    one, two = (autograd_graph_text(net, [Scale.apply(net(x), factor)], [x]) for factor in (1.0, 2.0))
    assert one != two


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_results_that_are_not_finite_are_compared_too(factor: float) -> None:
    class Factor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) * factor

    graph = capture(Factor(), (torch.randn(6, 4),))
    assert not graph.blocks
    assert graph.batch_size == 6
    assert "not all finite" in graph.checked["batch"]


class Cancelling(nn.Module):
    """A bias before a softmax: its gradient is 0 but for rounding, and with a noisy kernel behind it, rounding of
    other numbers each time."""

    def __init__(self, noise: float = 1e-4) -> None:
        super().__init__()
        self.shift, self.noisy = nn.Parameter(torch.zeros(1)), Noisy(noise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noisy(torch.softmax(x + self.shift, -1))


def test_gradients_that_are_rounding_are_judged_by_the_size_of_the_others() -> None:
    net, x = model(Cancelling()), torch.randn(6, 8)
    for _ in range(5):  # each time with other noise
        graph = capture(net, (x,), depth=3)
        assert graph.blocks == {}
        assert any("as exactly as the model repeats itself" in how for how in graph.checked.values())


@pytest.mark.parametrize("target", ["torch.cumsum", "torch.cumprod"])
def test_a_gradient_that_should_cancel_and_does_not_is_a_difference(target: str) -> None:
    net, x = model(Cancelling()), torch.randn(6, 8)
    graph, call = capture(net, (x,), depth=3), ModelCall((x,), {})
    assert not GraphChecker(net, call, ModelSnapshot(net)).differences("batch", graph, call.tensors, gradients=True)
    wrong = next(node for node in graph.nodes if "softmax" in node.target)
    wrong.target = target
    found = GraphChecker(net, call, ModelSnapshot(net)).differences("batch", graph, call.tensors, gradients=True)
    assert found.forward
    assert "1.shift" in found.parameters


def test_noise_as_large_as_the_gradients_proves_nothing() -> None:
    graph = capture(model(Cancelling(0.5)), (torch.randn(6, 8),), depth=3)
    assert graph.is_whole
