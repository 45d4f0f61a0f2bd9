"""Gradients of selected tensors pass through reentrant checkpoints, which torch refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.autograd_engine import differentiate, edge_of


@pytest.mark.parametrize("by_edge", [False, True])
def test_gradients_are_those_of_backward(by_edge: bool) -> None:
    torch.manual_seed(0)
    inner, outer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)), nn.Linear(4, 4)
    x, factor = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    leaves = [x, *inner.parameters(), *outer.parameters()]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    y = checkpoint(inner, outer(x), use_reentrant=True)
    found = differentiate([edge_of(y) if by_edge else y], [factor], leaves, retain_graph=True)
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    y.backward(factor)
    for leaf, gradient in zip(leaves, found, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)
