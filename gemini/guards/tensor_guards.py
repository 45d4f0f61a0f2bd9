"""Facts of tensors that are looked at in every call: whether they learn, their types, devices and sizes.

torch has a check of its own for that, for the guards of compiled code: one loop in C over all tensors. What it sees
depends on modes, so there is one for each; where it is not content, or torch has none, facts themselves are compared.
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
    """Those of some tensors, as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._facts = tensors, [*map(_FACTS, tensors)]
        self._guards: dict[Region, Any] = {}

    def hold(self) -> bool:
        """Whether they are the same still."""
        region = Region.current()
        guards = self._guards.get(region)
        if guards is not None and guards.check(*self._tensors):
            return True
        if [*map(_FACTS, self._tensors)] != self._facts:
            return False
        self._guards[region] = _guards_of(self._tensors)
        return True


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """torch's check for tensors that are as they are now, in these modes; None where it cannot be had."""
    kinds = {(type(one) in (torch.Tensor, nn.Parameter), one.layout) for one in tensors}
    if TensorGuards is None or kinds != {(True, torch.strided)}:
        return None
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (RuntimeError, TypeError, SystemError):  # made for torch's own use alone: another version may want more
        return None
