"""Assign gradients to parameters without autograd, where that cannot be observed.

Accumulation by torch's engine costs some microseconds per parameter, for one assignment where a parameter has no
gradient yet. Autograd must do it where code of the script could observe the difference:

    hooks on a parameter               `_backward_hooks`, `_post_accumulate_grad_hooks`
    hooks on its AccumulateGrad node   the node is alive and refers to the parameter, which shows in torch's use count
                                       (DDP; hooks on several parameters together)
    modes of the script                that see what autograd does, anomaly mode
    a gradient, or another layout      which is added to, or copied into
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from gemini.autograd_engine import rename_grad_fn
from gemini.guards.active_modes import packs_saved_tensors, without_saved_tensor_hooks
from gemini.runtime.pool.signals import count_user_code_runs

_SEEN = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "grad")
_BARE = (None, None, None)
_HOLDERS, _IS_DENSE = torch.Tensor._use_count, torch.Tensor.is_contiguous
with torch.inference_mode(False), torch.enable_grad():
    _LEAF = torch.zeros((), device="cpu", requires_grad=True)  # represents all parameters
    _FREED = _LEAF.exp()  # its graph is freed
    torch.autograd.grad(_FREED, _LEAF)


def can_assign(targets: Sequence[torch.Tensor]) -> bool:
    """Whether all are parameters without gradients whose accumulation is unobservable."""
    return (
        {*map(type, targets)} == {nn.Parameter}
        and _are_bare([*map(_SEEN, targets)])
        and {*map(_HOLDERS, targets)} == {1}
        and all(map(_IS_DENSE, targets))
        and not torch.is_anomaly_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def _are_bare(seen: list[tuple[Any, Any, Any]]) -> bool:
    """Whether there are neither hooks nor gradients; copied parameters have empty hook tables."""
    is_usual = seen.count(_BARE) == len(seen)
    return is_usual or all(not hooks and not late and gradient is None for hooks, late, gradient in seen)


def assign_gradients(targets: Sequence[torch.Tensor], found: list[Any]) -> None:
    """Assign gradients, which have no other owner, to such parameters."""
    if are_dense(found):
        _assign_all(targets, found)
        return
    for target, gradient in zip(targets, found, strict=True):
        if gradient is not None:
            is_as_usual = gradient.layout is not torch.strided or gradient.is_contiguous()
            target.grad = gradient if is_as_usual else gradient.contiguous()


class EarlyGradients:
    """Gradients assigned before they are computed, as their memory is known.

    The controller waits for the step, so they are unobservable unless code of the script runs in between.
    """

    def __init__(self, targets: Sequence[torch.Tensor], found: list[Any]) -> None:
        """Dense gradients, of parameters for which `can_assign` holds."""
        self._targets, self._found, self._counted = targets, found, count_user_code_runs()

    def give(self) -> None:
        """Assign them."""
        _assign_all(self._targets, self._found)

    def is_right(self, found: list[Any]) -> bool:
        """Whether these are the gradients, and no code of the script has run in between."""
        is_same = len(found) == len(self._found) and all(map(is_, found, self._found))
        return is_same and self._counted == count_user_code_runs()

    def revoke(self) -> None:
        """Undo the assignment, except where the script has assigned another gradient."""
        for target, gradient in zip(self._targets, self._found, strict=True):
            if target.grad is gradient:
                target.grad = None


def _assign_all(targets: Sequence[torch.Tensor], found: list[Any]) -> None:
    deque(map(setattr, targets, repeat("grad"), found), 0)


def are_dense(found: list[Any]) -> bool:
    """Whether all gradients exist and are contiguous."""
    try:
        return all(map(_IS_DENSE, found))
    except (TypeError, RuntimeError):  # there is none, or it is sparse
        return False


def make_freed_root(root: torch.Tensor, name: str) -> torch.Tensor:
    """Return a root whose graph is already freed, made by a node of this name."""
    function: Any = rename_grad_fn(_FreedRoot, name)
    with enable_graph():
        made: torch.Tensor = super(torch.autograd.Function, function).apply([root], _FREED)
    return made


class _FreedRoot(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, contents: list[torch.Tensor], freed: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return contents.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        """Pass on to the freed graph: torch itself raises."""
        return None, gradient


def enable_graph() -> AbstractContextManager[Any]:
    """Inside, graphs are recorded, whatever the modes and hooks of the script."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not packs_saved_tensors():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(without_saved_tensor_hooks())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    return stack
