"""Autograd edges that a profile stores outlive their tensors."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from gemini.autograd_engine import differentiate, edge_of
from gemini.profiling.detach import detach_with_grad

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(_, gradient):
        return gradient * 2

kept = []
for _ in range(2000):
    used, unused = detach_with_grad(torch.randn(4)), detach_with_grad(torch.randn(4))
    kept.append((edge_of(Twice.apply(used)), edge_of(used), edge_of(unused)))
    del used, unused
filled = [torch.randn(3) for _ in range(20000)]  # the freed memory is used for something else
for root, used, unused in kept:
    first, second = differentiate((root,), (torch.ones(4),), (used, unused))
    assert first.tolist() == [2.0] * 4 and second is None
print("alive")
"""


def test_an_edge_outlives_its_tensor_even_where_nothing_leads_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-2000:]
