"""Assignments: attributes of modules that the model's glue sets while it runs.

    for layer in self.layers:
        layer.attention.mask = mask        an assignment, before the layer runs
    self.state = state.detach()            an assignment, at the end

A graph must repeat these: a module kept whole reads its attribute, and the next call may. Tensors that nodes made,
sizes and None are written down as nodes that call `assign`. Other values (a counter) a graph cannot compute again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemini.capture.numbers import TracedFloat, TracedInt

TARGET = "gemini.capture.assignments.assign"
_INTERNAL = frozenset(vars(nn.Module()))
_MISSING: Any = object()


def assign(module: nn.Module, name: str, value: torch.Tensor | int | float | None) -> None:
    """Set an attribute of a module."""
    setattr(module, name, value)


class Attributes:
    """The attributes of a model's modules as last seen, and those that the glue has set since."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.last = {id(module): _own(module) for module in model.modules()}
        self.touched: set[tuple[int, str]] = set()  # also those set to the value they had

    def see(self, module: nn.Module | None) -> None:
        """Take the attributes of a module and its children as they are now: its own run may have changed them."""
        for part in module.modules() if module is not None else ():
            self.last[id(part)] = _own(part)

    def set_since(self, module: nn.Module, touched: bool) -> Iterator[tuple[str, str, Any, bool]]:
        """(module, attribute, value, whether another) of what the glue has set in a module or its children.

        With `touched`, also where the value is the same: the module itself may have changed it by the next call.
        """
        for part in module.modules():
            name, before = self.names.get(id(part)), self.last.get(id(part), {})
            if name is None:
                continue
            for key, value in _own(part).items():
                other = value is not before.get(key, _MISSING) and not _equal(value, before.get(key, _MISSING))
                if other or (touched and (id(part), key) in self.touched):
                    self.touched.discard((id(part), key))
                    before[key] = value
                    yield name, key, value, other


def _own(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    found.update(module._buffers)
    return found


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)


def can_be_assigned(value: Any, other: bool) -> bool:
    """Whether a graph can set an attribute to a value. A plain one that changed may be another each time."""
    if isinstance(value, (TracedInt, TracedFloat)):
        return True
    if isinstance(value, _PLAIN):
        return not other
    return value is None or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


_PLAIN = (bool, int, float, str)
