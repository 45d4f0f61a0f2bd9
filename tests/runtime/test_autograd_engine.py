"""Backward by the engine alone equals torch's and imports nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from gemini.autograd_engine import accumulate, differentiate, edge_of
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool

_ALONE = """
import sys
import torch
from gemini.autograd_engine import accumulate, differentiate

x = torch.randn(4, 3, requires_grad=True)
y = x.exp()
(found,) = differentiate([y], [torch.ones(4, 3)], [x], retain_graph=True)
accumulate([y], [torch.ones(4, 3)])
assert torch.equal(found, x.grad)
print("sympy" in sys.modules)
"""


class Loaded(nn.Module):
    """Tells whether the library of symbolic mathematics is loaded where it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 0 + float("sympy" in sys.modules)


def test_as_torch() -> None:
    x, weight = torch.randn(5, 3), torch.randn(3, 3, requires_grad=True)
    hidden = torch.tanh(x @ weight)
    given = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(hidden, weight, given, retain_graph=True)
    (found, none) = differentiate([edge_of(hidden)], [given], [weight, torch.ones(1, requires_grad=True)], True)
    assert none is None
    assert found is not None
    assert torch.equal(expected, found)
    accumulate([hidden], [given])
    assert weight.grad is not None
    assert torch.equal(expected, weight.grad)


def test_a_gradient_of_another_shape_is_told() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        accumulate([x.exp()], [torch.ones(7, 3)])


def test_nothing_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.usefixtures("trusted_tests")
def test_nothing_is_loaded_in_a_worker() -> None:
    pool = WorkerPool(1, 1)
    try:
        model = nn.Sequential(Loaded(), nn.Linear(4, 4))
        dispatch.manage(model, ManagedModel(model, pool, quiet=True))
        x = torch.randn(2, 4, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        assert float(model[0](x).detach().sum()) == 0
    finally:
        pool.stop()
