"""Functional call: a call of a model with other tensors in the place of its parameters (`torch.func.functional_call`).

They are gone when the call returns: such a call cannot be deferred, nor repeated for higher-order gradients. It runs
in the controller.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import stateless

from gemini.guards.base import ChangeGuard

_SWAPPING = stateless._functional_call.__code__


class SwappedParametersError(Exception):
    """A module has other tensors in the place of its parameters, for this call."""


class SwappedParameters(ChangeGuard):
    """A call with other tensors in the place of the model's parameters."""

    def check(self, module: nn.Module) -> str | None:
        """Return the reason if parameters are swapped for this call, or None."""
        return (
            "it is called with other parameters than its own"
            if has_swapped_parameters([*module.parameters()])
            else None
        )


def are_computed(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether some of these are tensors in the place of parameters."""
    kinds = {*map(type, parameters)}
    return kinds != {nn.Parameter} and not all(isinstance(parameter, nn.Parameter) for parameter in parameters)


def has_swapped_parameters(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a model with these parameters runs with tensors swapped in for this call."""
    if are_computed(parameters):
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _SWAPPING:
            return True
    return False
