"""Placeholder tensors: stand for tensors inside argument objects that a module does not use.

A layer gets the whole key-value cache and uses its own part of it. Sending all of it to every layer would cost the
square of their number. Tensors inside objects are therefore not sent at first: the worker has placeholders with their
shape and dtype. If a module does more with one than pass it on, the call is undone and repeated with all tensors, as
are all later calls of that module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gemini.runtime.argument_mutations import contents_of, find_objects, is_transparent

PlaceholderSpec = tuple[int, tuple[int, ...], str, bool]  # place among the inputs, shape, dtype, requires_grad
PLACEHOLDER_USED = "it uses a tensor that was not sent"
_METADATA = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor._version.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
}


class PlaceholderUsedError(BaseException):
    """A placeholder was used. Not an exception of user code; it counts even if user code catches it."""


class PlaceholderUse:
    """Whether placeholders were used."""

    seen = False

    @classmethod
    def was_used(cls) -> bool:
        """Return whether they were used since the last check."""
        if not cls.seen:  # setting an attribute of a class costs more than the rest of the check
            return False
        cls.seen = False
        return True


class PlaceholderTensor(torch.Tensor):  # type: ignore[misc]
    """Stands for a tensor that was not sent."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer queries of the metadata; raise for everything else."""
        if func not in _METADATA:
            PlaceholderUse.seen = True
            raise PlaceholderUsedError
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def find_placeholders(
    args: Iterable[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> list[PlaceholderSpec]:
    """Return the tensors of a call that need not be sent: those inside objects, except where pickling is custom."""
    direct: set[int] = set()
    inside: set[int] = set()
    _collect_direct((*args, *kwargs.values()), direct)
    if len(direct) == len(tensors):
        return []
    for value in find_objects(tuple(args), kwargs):
        if is_transparent(value):
            _collect_direct(contents_of(value).values(), inside)
    inside -= direct
    return [
        (at, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
        for at, tensor in enumerate(tensors)
        if id(tensor) in inside and type(tensor) is torch.Tensor and tensor.layout is torch.strided
    ]


def _collect_direct(values: Iterable[Any], found: set[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(id(value))
        elif isinstance(value, tuple):
            _collect_direct(value, found)


def insert_placeholders(tensors: list[Any], specs: list[PlaceholderSpec]) -> None:
    """Insert placeholders in the place of tensors that were not sent."""
    for at, shape, dtype, requires_grad in specs:
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        tensors[at] = torch.Tensor._make_subclass(PlaceholderTensor, empty, requires_grad)
