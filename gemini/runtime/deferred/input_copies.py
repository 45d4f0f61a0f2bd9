"""Copies of inputs and operands: later writes of the script must not affect a deferred call.

Writes through NumPy or `.data` leave no trace, so a tensor is copied when it is used, and compared with an earlier copy
bit by bit. Parameters are not copied: `hazard_mode` runs the call before they are written, and their versions are
compared.

The copy of a tensor that requires a gradient is connected to its present place in the graph.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

_VERSION = attrgetter("_version")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class InputCopies:
    """Tensors that were used, by identity, with their copies."""

    def __init__(self) -> None:
        # Holds the tensor, so that no other gets its identity.
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the present contents, connected to the graph; the same one while they do not change."""
        known = self._found.get(id(tensor))
        if isinstance(tensor, nn.Parameter):
            if known is None:
                self._found[id(tensor)] = tensor, tensor, tensor
                self.watch([tensor])
            return tensor
        if known is not None and _is_same(tensor, known[1]) and _is_connected(tensor, known[2]):
            return known[2]
        if not tensor.requires_grad and not torch.is_inference_mode_enabled():
            copy = pinned = tensor.clone()
        else:
            with torch.inference_mode(False):
                copy = tensor.detach().clone()
                with torch.enable_grad():
                    pinned = CopiedInput.apply([copy], tensor) if tensor.requires_grad else copy
        self._found[id(tensor)] = tensor, copy, pinned
        return pinned

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """Record the versions of parameters that must not change."""
        self._watched += parameters
        self._versions += _versions(parameters)

    def changed(self) -> torch.Tensor | None:
        """Return a parameter that was written, or None."""
        now = _versions(self._watched)
        if now == self._versions:
            return None
        return next(one for one, new, old in zip(self._watched, now, self._versions, strict=True) if new != old)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:
        return [*map(version_of, tensors)]


def version_of(tensor: torch.Tensor) -> int:
    """Return torch's version counter; 0 for a tensor without one."""
    try:
        return int(tensor._version)
    except RuntimeError:  # inference tensors have none
        return 0


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype or tensor.device != copy.device:
        return False
    bits = _BITS.get(tensor.element_size())
    if bits is None:  # complex128
        return False
    return bool(torch.equal(_plain(tensor).view(bits), _plain(copy).view(bits)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Resolve lazy conjugation and negation, of which torch has no bit view."""
    return tensor.detach().resolve_conj().resolve_neg()


def _is_connected(tensor: torch.Tensor, pinned: torch.Tensor) -> bool:
    """Whether a copy is connected to the tensor's present place in the graph."""
    if not tensor.requires_grad or not pinned.requires_grad:
        return bool(tensor.requires_grad == pinned.requires_grad)
    node = pinned.grad_fn.next_functions[0][0]
    return node is tensor.grad_fn if tensor.grad_fn is not None else getattr(node, "variable", None) is tensor


class CopiedInput(torch.autograd.Function):  # type: ignore[misc]
    """A copy in place of a tensor: contents of the copy, gradients to the tensor."""

    @staticmethod
    def forward(ctx: Any, copy: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the copy; in a list, so that autograd treats it as new."""
        ctx.set_materialize_grads(False)  # a missing gradient stays None
        return copy[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:  # noqa: ARG004
        """Pass the gradient to the tensor."""
        return None, gradient
