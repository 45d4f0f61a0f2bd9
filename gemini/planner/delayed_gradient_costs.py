"""Costs of delayed weight gradients in workers (`step.delayed_weight_grads`).

every layer       runs Python functions around its kernels in forward, backward and weight gradient
a convolution     computes the gradients of input and weight in two calls, each of which reorders its operands, and adds
                  the second to the accumulated gradient
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gemini.autograd_engine import differentiate

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REPEATS = 3
_CALLS = 40  # of a small layer per measurement


class BackwardCost(NamedTuple):
    """A backward in two parts: its time relative to the ordinary one, and the share of weight gradients."""

    ratio: float
    weight_share: float | None

    @staticmethod
    def from_times(inputs_ms: float, weights_ms: float, usual_ms: float) -> BackwardCost:
        """Return the cost for measured times."""
        whole = inputs_ms + weights_ms
        return BackwardCost(whole / max(usual_ms, 1e-6), weights_ms / max(whole, 1e-6))


UNCHANGED = BackwardCost(1.0, None)


def min_time_ms(call: Callable[[], Any], tries: int = _REPEATS) -> float:
    """Return the shortest time of a call (ms): thread time with one thread, else wall time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(tries + 1):
        begin = clock()
        call()
        found.append((clock() - begin) * 1e3)
    return min(found[1:])


@functools.lru_cache(maxsize=1)
def layer_overhead_ms() -> tuple[float, float]:
    """Return the overhead of delayed weight gradients per layer in forward and backward (ms)."""
    from gemini.step.delayed_weight_grads import STORE, DelayedGrad, run_delayed
    from gemini.step.split_backward_ops import _Linear

    given, weight = torch.zeros(4, 8, requires_grad=True), torch.zeros(8, 8, requires_grad=True)
    bias, gradient = torch.zeros(8, requires_grad=True), torch.zeros(4, 8)
    sums: Any = _Sums()

    def usual() -> Any:
        return F.linear(given, weight, bias)

    def delayed() -> Any:
        return _Linear.apply(given, weight, bias)

    def usual_backward() -> None:
        differentiate((usual(),), (gradient,), (given, weight, bias))

    def delayed_backward() -> None:
        queue: deque[DelayedGrad] = deque()
        with STORE.collect_into(queue):
            differentiate((delayed(),), (gradient,), (given,))
        run_delayed(queue, sums)

    with torch.enable_grad():
        one, other, whole, parts = (_time_per_call(call) for call in (usual, delayed, usual_backward, delayed_backward))
    forward = max(0.0, other - one)
    return forward, max(0.0, parts - whole - forward)


class _Sums:
    """Accumulated gradients."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the accumulated gradient of a parameter, which is not empty."""
        if id(parameter) not in self.sums:
            self.sums[id(parameter)] = torch.zeros_like(parameter.detach())
        return self.sums[id(parameter)], False


def _time_per_call(call: Callable[[], Any]) -> float:
    return min_time_ms(lambda: [call() for _ in range(_CALLS)]) / _CALLS


def measure_convolution_backward(
    layer: Any, shape: tuple[int, ...], made: tuple[int, ...], has_input: bool
) -> BackwardCost:
    """Measure the backward of a convolution in two parts."""
    from gemini.step.split_backward_ops import _each as dims_of

    dims, weight = len(shape) - 2, layer.weight.detach()
    given, gradient = weight.new_zeros(shape), weight.new_ones(made)
    shifts = [dims_of(one, dims) for one in (layer.stride, layer.padding, layer.dilation)]
    sizes = None if layer.bias is None else [layer.bias.numel()]

    def run(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, given, weight, sizes, *shifts, False, [0] * dims, layer.groups, mask
        )

    bias, total = layer.bias is not None, torch.zeros_like(weight)
    usual = min_time_ms(lambda: run([has_input, True, bias]))
    back = min_time_ms(lambda: run([True, False, False])) if has_input else 0.0
    return BackwardCost.from_times(back, min_time_ms(lambda: total.add_(run([False, True, bias])[1])), usual)
