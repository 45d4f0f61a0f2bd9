"""Swapped parameters: a call of a model with other tensors in the place of its own (`torch.func.functional_call`).

When the call returns they are gone again: such a call cannot be put off, and not be made again for derivatives of its
gradients. It runs in the program's process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import stateless

_SWAPPING = stateless._functional_call.__code__


class SwappedParametersError(Exception):
    """A module has other tensors in the place of its parameters, for this call."""


def are_computed(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether some are none, but tensors in the place of parameters."""
    kinds = {*map(type, parameters)}
    return kinds != {nn.Parameter} and not all(isinstance(parameter, nn.Parameter) for parameter in parameters)


def has_swapped_parameters(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a model with these parameters runs with tensors that somebody has put in for this call."""
    if are_computed(parameters):
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _SWAPPING:
            return True
    return False
