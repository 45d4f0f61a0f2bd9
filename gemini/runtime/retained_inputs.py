"""Tensors that calls of modules keep, as their inputs: these objects are read again when gradients are differentiated.

A deferred tensor that becomes such a one must not take its contents over: it stands for it instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_KEPT = WeakTensorKeyDictionary()


def retain(tensors: Iterable[torch.Tensor]) -> None:
    """These objects stay what they are for as long as they live."""
    for tensor in tensors:
        _KEPT[tensor] = True


def is_retained(tensor: torch.Tensor) -> bool:
    """Whether a call has this object."""
    return tensor in _KEPT
