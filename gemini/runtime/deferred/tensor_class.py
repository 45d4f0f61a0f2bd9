"""Posing: the class of deferred tensors, as a program may look at it.

`type(hidden) == torch.Tensor` decides in many a program whether a hidden state is one tensor or a pair, and
`print(type(output))` shows what it has got. `isinstance` is right anyway; `type(x) is torch.Tensor` nobody can answer.
"""

from __future__ import annotations

from typing import Any

import torch

_Meta: Any = type(torch.Tensor)


class Posing(_Meta):  # type: ignore[misc]
    """The class of a class that is equal to torch.Tensor, and called so."""

    def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
        """Under the name of torch's."""
        made = super().__new__(cls, name, bases, own)
        made.__name__, made.__qualname__, made.__module__ = "Tensor", "Tensor", "torch"
        return made

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is torch.Tensor

    def __ne__(cls, other: object) -> bool:
        return other is not cls and other is not torch.Tensor

    # Another hash than that of what it is equal to: torch keeps classes with a `__torch_function__` in a set, and would
    # ask only one of the two.
    __hash__ = type.__hash__
