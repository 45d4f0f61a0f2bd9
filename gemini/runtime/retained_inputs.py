"""Retained inputs: tensors that remote calls retain as their inputs, and read again when gradients are differentiated.

A deferred tensor among them must not take its contents over in place: it refers to the real tensor instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_retained = WeakTensorKeyDictionary()


def retain(tensors: Iterable[torch.Tensor]) -> None:
    """Mark these tensor objects as inputs of a call, for as long as they live."""
    for tensor in tensors:
        _retained[tensor] = True


def is_retained(tensor: torch.Tensor) -> bool:
    """Return whether a call retains this object."""
    return tensor in _retained
