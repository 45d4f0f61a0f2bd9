"""Giving parameters their gradients as autograd would, where nobody can tell that it was not.

Accumulation by torch's engine costs a few microseconds a parameter, for what is one assignment where a parameter has no
gradient yet. Autograd must do it where anything of the program would see it:

    hooks on a parameter               `_backward_hooks`, `_post_accumulate_grad_hooks`
    hooks on its node of the graph     that node lives, and holds the parameter: torch counts its holders. DDP does so,
                                       and whoever asks for hooks on several parameters together
    modes of the program               that see what autograd does, anomaly mode
    a gradient, or another layout      which is added to, or copied into
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_GRADIENT, _HOLDERS, _IS_DENSE = attrgetter("grad"), methodcaller("_use_count"), methodcaller("is_contiguous")


def take_as_they_are(targets: Sequence[torch.Tensor]) -> bool:
    """Whether all are parameters without gradients, and nobody sees how they come by one."""
    return (
        {*map(type, targets)} == {nn.Parameter}
        and not any(map(_HOOKS, targets))
        and not any(map(_LATE_HOOKS, targets))
        and {*map(_GRADIENT, targets)} == {None}
        and {*map(_HOLDERS, targets)} == {1}
        and all(map(_IS_DENSE, targets))
        and not torch.is_anomaly_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def give(targets: Sequence[torch.Tensor], found: list[Any]) -> None:
    """Gradients, which are nobody else's, to such parameters."""
    for target, gradient in zip(targets, found, strict=True):
        if gradient is None:
            continue
        if target.grad is not None:
            target.grad += gradient
        elif gradient.layout is torch.strided and not gradient.is_contiguous():
            target.grad = gradient.contiguous()
        else:
            target.grad = gradient
    found.clear()
