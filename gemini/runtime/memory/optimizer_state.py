"""Optimizer state: moves with a parameter that changes its device.

A parameter that moves to its worker's device may have been trained before, and its momentum is still on the former
device. It is moved before the next step of the optimizer that holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_moved: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by identity
_watching: list[Any] = []


def move_optimizer_state(tensors: Iterable[torch.Tensor]) -> None:
    """Note that these tensors have changed their device."""
    _moved.update({id(tensor): tensor for tensor in tensors})
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in _moved and parameter in optimizer.state:
                _follow(optimizer.state[parameter], parameter)


def _follow(state: dict[str, Any], parameter: torch.Tensor) -> None:
    for key, value in state.items():
        # A scalar is a step counter, which optimizers keep in main memory.
        if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
            state[key] = value.to(parameter.device)
