"""Layers in workers: what it costs that their weight gradients are computed apart (`runtime.executor.store`).

every layer       has functions in Python around its kernels, forward, backward and when the rest is computed
a convolution     computes the gradients of input and weight in two calls, each of which arranges its operands anew, and
                  adds the second one to the sum
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
_TRIES = 3
_CALLS = 40  # of a small layer, timed as one


class BackwardCost(NamedTuple):
    """A backward in parts: how many times as long as the ordinary one, and how much of it is for weights."""

    ratio: float
    weight_share: float | None

    @staticmethod
    def of(inputs_ms: float, weights_ms: float, usual_ms: float) -> BackwardCost:
        """What was measured."""
        whole = inputs_ms + weights_ms
        return BackwardCost(whole / max(usual_ms, 1e-6), weights_ms / max(whole, 1e-6))


UNCHANGED = BackwardCost(1.0, None)


def min_time_ms(call: Callable[[], Any], tries: int = _TRIES) -> float:
    """The time of a call that nothing disturbs (ms); on one thread its own, else that of the clock."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(tries + 1):
        begin = clock()
        call()
        found.append((clock() - begin) * 1e3)
    return min(found[1:])


@functools.lru_cache(maxsize=1)
def layer_overhead_ms() -> tuple[float, float]:
    """What a stored layer takes beyond an ordinary one, forward and backward (ms), whatever its size."""
    from gemini.step.delayed_weight_grads import STORE, DelayedGrad, run_delayed
    from gemini.step.split_backward_ops import _Linear

    given, weight = torch.zeros(4, 8, requires_grad=True), torch.zeros(8, 8, requires_grad=True)
    bias, gradient = torch.zeros(8, requires_grad=True), torch.zeros(4, 8)
    sums: Any = _Sums()

    def usual() -> Any:
        return F.linear(given, weight, bias)

    def stored() -> Any:
        return _Linear.apply(given, weight, bias)

    def usual_backward() -> None:
        differentiate((usual(),), (gradient,), (given, weight, bias))

    def stored_backward() -> None:
        queue: deque[DelayedGrad] = deque()
        with STORE.collect_into(queue):
            differentiate((stored(),), (gradient,), (given,))
        run_delayed(queue, sums)

    with torch.enable_grad():
        one, other, whole, parts = (_time_per_call(call) for call in (usual, stored, usual_backward, stored_backward))
    forward = max(0.0, other - one)
    return forward, max(0.0, parts - whole - forward)


class _Sums:
    """Where gradients are added up."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The sum of a parameter, which has something in it."""
        if id(parameter) not in self.sums:
            self.sums[id(parameter)] = torch.zeros_like(parameter.detach())
        return self.sums[id(parameter)], False


def _time_per_call(call: Callable[[], Any]) -> float:
    return min_time_ms(lambda: [call() for _ in range(_CALLS)]) / _CALLS


def measure_convolution_backward(
    layer: Any, shape: tuple[int, ...], made: tuple[int, ...], has_input: bool
) -> BackwardCost:
    """The backward of a convolution."""
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
    return BackwardCost.of(back, min_time_ms(lambda: total.add_(run([False, True, bias])[1])), usual)
