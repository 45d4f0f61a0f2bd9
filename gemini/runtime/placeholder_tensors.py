"""Absent tensors: those that a unit is given inside an object, and does not look at.

A layer is given the whole key-value cache and uses its own part of it. To send all of it to every layer would cost the
square of their number. So tensors inside objects are first left at home: the worker has their shape and type in their
place. A unit that does more with one than to pass it on has *touched* it: the call is undone and made again with all
tensors, as are all later calls of that unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gemini.runtime.argument_mutations import contents_of, find_objects, is_transparent

PlaceholderSpec = tuple[
    int, tuple[int, ...], str, bool
]  # place among the inputs, shape, type, whether it wants a gradient
PLACEHOLDER_USED = "it uses a tensor that stayed at home"
_KNOWN = {
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
    """An absent tensor was used. No exception of the unit's own; it counts even where the unit's code catches it."""


class PlaceholderUse:
    """Whether absent tensors were used."""

    seen = False

    @classmethod
    def have_been_made(cls) -> bool:
        """Since the last look."""
        if not cls.seen:  # to set an attribute of a class costs more than all the rest of a look
            return False
        cls.seen = False
        return True


class PlaceholderTensor(torch.Tensor):  # type: ignore[misc]
    """In the place of a tensor that stayed at home."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Its shape is known; everything else is at home."""
        if func not in _KNOWN:
            PlaceholderUse.seen = True
            raise PlaceholderUsedError
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def find_placeholders(
    args: Iterable[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> list[PlaceholderSpec]:
    """Which of the tensors of a call can stay at home: those that are only inside objects, and not part of how one is
    pickled."""
    direct: set[int] = set()
    held: set[int] = set()
    _direct((*args, *kwargs.values()), direct)
    if len(direct) == len(tensors):
        return []
    for value in find_objects(tuple(args), kwargs):
        if is_transparent(value):
            _direct(contents_of(value).values(), held)
    held -= direct
    return [
        (at, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
        for at, tensor in enumerate(tensors)
        if id(tensor) in held and type(tensor) is torch.Tensor and tensor.layout is torch.strided
    ]


def _direct(values: Iterable[Any], found: set[int]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(id(value))
        elif isinstance(value, tuple):
            _direct(value, found)


def insert_placeholders(tensors: list[Any], facts: list[PlaceholderSpec]) -> None:
    """Put what stands for absent tensors in their places."""
    for at, shape, dtype, requires_grad in facts:
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        tensors[at] = torch.Tensor._make_subclass(PlaceholderTensor, empty, requires_grad)
