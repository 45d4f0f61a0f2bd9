"""A batch in micro-batches equals the whole batch; unsplittable batches stay whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.eager.split_proof import prove_split
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool


class Plain(nn.Module):
    """Two inputs, a nest of outputs, the batch in dimension one of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, *, other: torch.Tensor) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"x": x, "pair": (x.sum(-1), other.transpose(0, 1) * 2), "name": "plain"}


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y @ y.t()


def managed(model: nn.Module, pool: WorkerPool, degree: int) -> ManagedModel:
    made = ManagedModel(model, pool, quiet=True, micro_batches=degree)
    dispatch.manage(model, made)
    return made


@pytest.mark.parametrize(("size", "degree"), [(8, 4), (7, 3), (2, 4), (1, 4)])
def test_equals_the_whole_batch(size: int, degree: int, pool: WorkerPool) -> None:
    model = Plain()
    reference = copy.deepcopy(model)
    made = managed(model, pool, degree)
    for at in range(3):
        torch.manual_seed(at)
        x, other = torch.randn(size, 8, requires_grad=True), torch.randn(4, size, requires_grad=True)
        expected = reference(x, other=other)
        wanted = torch.autograd.grad(
            expected["x"].square().sum() + expected["pair"][1].sum(), [x, other, *reference.parameters()]
        )
        out = model(x, other=other)
        found = torch.autograd.grad(out["x"].square().sum() + out["pair"][1].sum(), [x, other, *model.parameters()])
        assert out["name"] == "plain"
        torch.testing.assert_close(out["pair"], expected["pair"])
        torch.testing.assert_close(found, wanted)
    if size > 1:
        assert made.calls > 2 * min(size, degree), "micro-batches did not run"


def test_another_size_of_the_last_batch(pool: WorkerPool) -> None:
    model = Plain()
    reference = copy.deepcopy(model)
    managed(model, pool, 4)
    for size in (8, 8, 3, 8, 5):
        x, other = torch.randn(size, 8), torch.randn(4, size)
        torch.testing.assert_close(model(x, other=other)["pair"], reference(x, other=other)["pair"])


def test_backward_again_and_of_gradients(pool: WorkerPool) -> None:
    model = Plain()
    managed(model, pool, 2)
    x, other = torch.randn(4, 8, requires_grad=True), torch.randn(4, 4)
    for _ in range(3):
        out = model(x, other=other)["x"].pow(3).sum()
        (one,) = torch.autograd.grad(out, x, retain_graph=True)
        (two,) = torch.autograd.grad(out, x, create_graph=True)
        torch.testing.assert_close(one, two)
        model.zero_grad()
        two.square().sum().backward()
        assert all(p.grad is not None for p in model.layers[0].parameters())
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Normed(nn.BatchNorm1d(8)), "BatchNorm1d takes statistics"),
        (Normed(nn.Dropout(0.5)), "random"),
        (Contrast(), "matmul of samples in different dimensions"),
    ],
)
def test_says_why_a_batch_stays_whole(model: nn.Module, reason: str, pool: WorkerPool, capsys: Any) -> None:
    assert reason in prove_split(model, (torch.randn(6, 8),), {}).reason
    reference = copy.deepcopy(model)
    made = ManagedModel(model, pool, micro_batches=3)
    dispatch.manage(model, made)
    for at in range(3):
        x = torch.randn(6, 8)
        torch.manual_seed(at)
        expected = reference(x)
        torch.manual_seed(at)
        torch.testing.assert_close(model(x), expected)
    assert "runs a batch as a single micro-batch, not in 3" in capsys.readouterr().err


def test_an_error_in_a_micro_batch_is_the_models_own(pool: WorkerPool) -> None:
    model = Plain()
    managed(model, pool, 2)
    for _ in range(2):
        model(torch.randn(4, 8), other=torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 9), other=torch.randn(2, 4))
    assert F.relu(model(torch.randn(4, 8), other=torch.randn(2, 4))["x"]).shape == (4, 8)
