"""Every node of an unusual model is measured, in every mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import Profile, profile

X = torch.randn(2, 4)


class Made(nn.Module):
    """A model of a function and some modules."""

    def __init__(self, function, *parts) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x):
        return self.function(x, *self.parts)


class Same(nn.Module):
    def forward(self, x):
        return x


class Twice(nn.Module):
    def forward(self, x):
        return x, x


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        chosen, out = self.router(x).argmax(1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out.sum()


def linear():
    return nn.Linear(4, 4)


def without_gradients(x, layer):
    with torch.no_grad():
        return layer(x)


def inference(x, layer):
    with torch.inference_mode():
        return layer(x)


def autocast(x, first, second):
    with torch.autocast("cpu", torch.bfloat16):
        y = second(first(x))
    return y.float().sum()


def in_place(x, layer):
    y = layer(x) * 2
    y += 1
    flat = y.view(-1)
    flat[0] = 3.0
    return y.mul_(2).sum()


def chunks(x, layer):
    one, other = layer(x).chunk(2, 1)
    one = one.clone()
    one.add_(other)
    return (one * other).sum(), {"nested": [other, None]}


def hooked(x, layer):
    y = layer(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y.sum()


def unused(x, used, other):
    other(x)
    return used(x).sum()


CASES = {
    "no node that computes": (Made(lambda x: x), X),
    "integers only": (Made(lambda x: (x + 1) // 2), torch.arange(3)),
    "views only": (Made(lambda x: x.view(-1).view(2, -1)), X),
    "complex": (Made(lambda x, f: torch.fft.fft(f(x)).abs().sum(), linear()), X),
    "sparse gradients": (Made(lambda x, e: e(x).sum(), nn.Embedding(5, 3, sparse=True)), torch.arange(4)),
    "sparse gradients of a tied table": (
        Made(lambda x, e: (e(x) + e(x + 1)).sum(), nn.Embedding(9, 3, sparse=True)),
        torch.arange(4),
    ),
    "in place": (Made(in_place, linear()), X),
    "no gradients": (Made(without_gradients, linear()), X),
    "inference mode": (Made(inference, linear()), X),
    "autocast": (Made(autocast, linear(), linear()), X),
    "chunks and nests": (Made(chunks, linear()), X),
    "a node that returns what it got": (Made(lambda x, f, same: same(f(x)).sum(), linear(), Same()), X),
    "a node that returns it twice": (Made(lambda x, f, two: sum(two(f(x))).sum(), linear(), Twice()), X),
    "a result nobody reads": (Made(unused, linear(), linear()), X),
    "a detached way": (Made(lambda x, f: (f(x).detach() * f(x)).sum(), linear()), X),
    "a module called thrice": (Made(lambda x, f: f(f(f(x))).sum(), linear()), X),
    "a size that depends on values": (Made(lambda x, f: f(x)[f(x) > -9].sum(), linear()), X),
    "no rows": (Made(lambda x, f: f(x[:0]).sum(), linear()), X),
    "one sample": (Made(lambda x, f: f(x).sum(), linear()), X[:1]),
    "frozen": (Made(lambda x, f: f(x).sum(), linear()).requires_grad_(False), X),
    "half precision": (Made(lambda x, f: f(x).sum(), linear()).bfloat16(), X.bfloat16()),
    "double precision": (Made(lambda x, f: f(x).sum(), linear()).double(), X.double()),
    "weight norm": (Made(lambda x, f: f(x).sum(), nn.utils.parametrizations.weight_norm(linear())), X),
    "gradients of inputs": (Made(lambda x, f: f(x).sum(), linear()), X.clone().requires_grad_()),
    "routing": (Routed(), X),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_every_node_is_measured_in_any_mode(name, mode):
    model, batch = CASES[name]
    model.train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        graph = capture(model, (batch,))
        found = profile(graph, (batch,), cache=False, rounds=1)
        estimate = profile(graph, (batch,), analytic="h100")
    assert [(cost.name, cost.reason) for cost in found if cost.source != "measured"] == []
    assert len(found) == len(estimate) == len(graph.compute_nodes)
    assert found.check is not None
    assert found.backward_ms == 0 or mode != "no_grad"
    assert Profile.from_json(found.to_json()) == found


def test_a_hook_on_a_tensor_needs_gradients_and_gets_them():
    model = Made(hooked, linear())
    found = profile(capture(model, (X,)), (X,), cache=False, rounds=1)
    assert {cost.source for cost in found} == {"measured"}
    assert found.backward_ms > 0


def test_a_model_without_parameters_but_with_buffers_is_where_they_are():
    with torch.device("meta"):
        model = nn.BatchNorm1d(4, affine=False)
        batch = torch.empty(3, 4)
    assert profile(capture(nn.Sequential(model), (batch,)), (batch,)).mode == "analytic"
