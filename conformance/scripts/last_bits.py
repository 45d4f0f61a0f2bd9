"""`python last_bits.py seed program args`: how far roundings go in a program, where threads change nothing.

weights      what an optimizer is given moves to the next number that its type can hold, up or down, once
gradients    what a call of a linear layer, convolution or embedding adds to a gradient moves likewise, in the type that
             it was computed in (of an autocast region, say). Gradients are sums over the batch, and this is the least
             that another order of a sum can change

All of it by a generator of its own: the program draws the same random numbers as ever.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

_add = torch.optim.Optimizer.add_param_group
_moved: dict[int, torch.Tensor] = {}  # held, or another might get its identity
_generator = torch.Generator()
_SUMMING = ("linear", "conv1d", "conv2d", "conv3d", "embedding")


def neighbour(tensor: torch.Tensor) -> torch.Tensor:
    """Every number's neighbour, above or below."""
    above = torch.rand(tensor.shape, generator=_generator) < 0.5
    return torch.nextafter(tensor, torch.where(above, torch.inf, -torch.inf).to(tensor.dtype))


def move(tensor: torch.Tensor) -> None:
    """Every number to its neighbour; once."""
    if id(tensor) not in _moved and tensor.is_floating_point():
        _moved[id(tensor)] = tensor
        tensor.data.copy_(neighbour(tensor.data))


class Rounding(torch.autograd.Function):  # type: ignore[misc]
    """The tensor itself; its gradient with other last bits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same."""
        ctx.dtype = dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The neighbour; differentiable, as the gradient is."""
        if gradient.layout is not torch.strided:
            return gradient, None
        plain = gradient.detach().to(ctx.dtype)
        return gradient + (neighbour(plain) - plain).to(gradient.dtype), None


def _rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(*args: Any, **kwargs: Any) -> Any:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

        def of(value: Any) -> Any:
            if isinstance(value, torch.nn.Parameter) and value.requires_grad and torch.is_grad_enabled():
                return Rounding.apply(value, autocast or value.dtype)
            return value

        return function(*map(of, args), **{name: of(value) for name, value in kwargs.items()})

    return rounded


def _adding(optimizer: Any, group: dict[str, Any]) -> None:
    _add(optimizer, group)
    for tensor in group["params"]:
        move(tensor)


def install(seed: int) -> None:
    """From now on, in this process."""
    _generator.manual_seed(seed)
    torch.optim.Optimizer.add_param_group = _adding  # type: ignore[method-assign]
    for name in _SUMMING:
        setattr(F, name, _rounding(getattr(F, name)))


def main() -> None:
    install(int(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
