"""A program under `python` in which the last bit of every weight is another.

What an optimizer is given moves to the next number that its type can hold, up or down by a generator of its own, once.
It is the smallest change that there is. What becomes of it in the losses tells how far roundings go in a program whose
ops are too small for a second thread to change anything.
"""

from __future__ import annotations

from typing import Any

import torch

_add = torch.optim.Optimizer.add_param_group
_moved: dict[int, torch.Tensor] = {}  # held, or another might get its identity
_generator = torch.Generator().manual_seed(0)


def move(tensor: torch.Tensor) -> None:
    """Every number to its neighbour, above or below."""
    if id(tensor) in _moved or not tensor.is_floating_point():
        return
    _moved[id(tensor)] = tensor
    above = torch.rand(tensor.shape, generator=_generator) < 0.5
    towards = torch.where(above, torch.inf, -torch.inf).to(tensor.dtype)
    tensor.data.copy_(torch.nextafter(tensor.data, towards))


def _adding(optimizer: Any, group: dict[str, Any]) -> None:
    _add(optimizer, group)
    for tensor in group["params"]:
        move(tensor)


def install() -> None:
    """From now on, whatever an optimizer is given is moved."""
    torch.optim.Optimizer.add_param_group = _adding  # type: ignore[method-assign]
