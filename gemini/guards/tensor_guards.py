"""Tensor guards: requires_grad, dtype, device and shape of tensors, compared in every call.

torch has a check for the guards of compiled code: one loop in C over all tensors. Its result depends on autograd
modes, so there is one per mode; where it fails, or torch has none, the facts themselves are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gemini.ir.autograd_modes import Region

try:
    from torch._C._dynamo import guards as _of_torch
except ImportError:
    _of_torch = None  # type: ignore[assignment]

TensorGuards: Any = getattr(_of_torch, "TensorGuards", None)
_FACTS = attrgetter("requires_grad", "dtype", "device", "shape")


class TensorFacts:
    """The facts of some tensors at one time."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._facts = tensors, [*map(_FACTS, tensors)]
        self._guards: dict[Region, Any] = {}

    def hold(self) -> bool:
        """Return whether they are unchanged."""
        region = Region.current()
        guards = self._guards.get(region)
        if guards is not None and guards.check(*self._tensors):
            return True
        if [*map(_FACTS, self._tensors)] != self._facts:
            return False
        self._guards[region] = _guards_of(self._tensors)
        return True


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's check for these tensors as they are, in the current modes; None if it is not available."""
    kinds = {(type(one) in (torch.Tensor, nn.Parameter), one.layout) for one in tensors}
    if TensorGuards is None or kinds != {(True, torch.strided)}:
        return None
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (RuntimeError, TypeError, SystemError):  # internal to torch: another version may take other arguments
        return None
