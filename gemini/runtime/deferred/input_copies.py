"""Copies of what a call or an op was given: what the program writes to its tensors later must not leak in.

Writes through NumPy or `.data` leave no trace, so a tensor is copied when it is used, and one that was copied before
is compared with its copy, bit by bit. Parameters are not copied: nothing may write to them before the call is done
(see `watching`), and their versions are compared.

A copy of a tensor that requires a gradient is connected to it as it is now: gradients go where they would have gone.
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
        # The tensor itself is kept, or another might get its identity.
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the contents of now, in the program's graph; the same one as long as they are the same."""
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
        """Parameters that must stay as they are."""
        self._watched += parameters
        self._versions += _versions(parameters)

    def changed(self) -> torch.Tensor | None:
        """A parameter that has been written to."""
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
    """How often it was written to, as far as torch knows."""
    try:
        return int(tensor._version)
    except RuntimeError:  # made in inference mode: nobody counts
        return 0


def _is_same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype or tensor.device != copy.device:
        return False
    bits = _BITS.get(tensor.element_size())
    if bits is None:  # a complex number of doubles
        return False
    return bool(torch.equal(_plain(tensor).view(bits), _plain(copy).view(bits)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without what is still to be done to what its memory holds: torch has no other view of such a tensor."""
    return tensor.detach().resolve_conj().resolve_neg()


def _is_connected(tensor: torch.Tensor, pinned: torch.Tensor) -> bool:
    """Whether a copy is in the graph where the tensor is now."""
    if not tensor.requires_grad or not pinned.requires_grad:
        return bool(tensor.requires_grad == pinned.requires_grad)
    node = pinned.grad_fn.next_functions[0][0]
    return node is tensor.grad_fn if tensor.grad_fn is not None else getattr(node, "variable", None) is tensor


class CopiedInput(torch.autograd.Function):  # type: ignore[misc]
    """A copy in the place of a tensor: contents of the copy, gradients to the tensor."""

    @staticmethod
    def forward(ctx: Any, copy: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """The copy; in a list, so that autograd takes it for new."""
        ctx.set_materialize_grads(False)  # no gradient is none, not zeros
        return copy[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:  # noqa: ARG004
        """To the tensor."""
        return None, gradient
