"""The zoo comparison handles models that compute in a smaller dtype than that of their parameters."""

from __future__ import annotations

import torch
from torch import nn

from conformance.zoo.pipe_checks import Judge, _widened, smaller_types
from gemini.capture import capture
from gemini.ir.call_binding import ModelCall


class Norm(nn.Module):
    """Computes in float32 whatever it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


class Router(nn.Module):
    """Casts a part of itself to float32 when it first runs."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(4, 4)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float32)
        return x * self.classifier(x.float()).softmax(-1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Counting(nn.Module):
    """Casts what needs no gradient: that rounds no gradient."""

    def forward(self, x):
        return x * (x.detach() > 0).float().mean().to(x.dtype)


def test_casts_of_differentiable_values_are_found_inside_modules():
    call = ModelCall((torch.randn(3, 4, dtype=torch.float64),), {})
    assert smaller_types(Model(Norm()).double(), call) == ["float32"]
    assert smaller_types(Model(nn.LayerNorm(4)).double(), call) == []
    assert smaller_types(Model(Counting()).double(), call) == []


def test_a_model_that_casts_itself_is_judged_as_it_is_afterwards():
    model, x = Model(Router()), torch.randn(3, 4)
    wide = _widened(Judge(capture(model, (x,)), model, ModelCall((x,), {})))
    assert model.middle.classifier.weight.dtype is torch.float32
    wide.expected(11)
    assert model.middle.classifier.weight.dtype is torch.float32
    assert model.first.weight.dtype is torch.float64
