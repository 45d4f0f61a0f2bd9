"""Provenance: the origin of every tensor that the model's Python uses.

Every tensor of the traced call is identified by object identity: an input, a tensor of the model, or the result of a
node. A tensor of unknown origin is never recorded as a constant (a cached value matches the captured batch exactly and
is wrong on the next); the region that uses it becomes a basic block instead.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from gemini.ir.encode import walk
from gemini.ir.pytree import ModelObject

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


class ModelIndex:
    """The tensors and objects of a model, by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.parameters = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        self.buffers = {id(b): name for name, b in model.named_buffers(remove_duplicate=True)}
        self.objects: dict[int, ModelObject] = {}
        self.attributes: dict[int, str] = {}
        self._alive: list[Any] = []  # ids stay unique while these live
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                if key.startswith("_") and key in vars(_EMPTY):
                    continue
                self._index(name, key, value)

    def _index(self, module: str, key: str, value: Any) -> None:
        self._alive.append(value)
        prefix = f"{module}.{key}" if module else key
        if isinstance(value, torch.Tensor):
            self.attributes.setdefault(id(value), prefix)
        elif isinstance(value, (list, tuple, dict)):
            for path, leaf in walk(value):
                if isinstance(leaf, torch.Tensor) and all(kind in "ik" for kind, _ in path):
                    steps = "".join(f"[{step!r}]" for _, step in path)
                    self.attributes.setdefault(id(leaf), prefix + steps)
                    self._alive.append(leaf)
        elif not isinstance(value, (*_PLAIN, nn.Module)):
            self.objects.setdefault(id(value), ModelObject(module, key))

    def owner(self, value: Any) -> ModelObject | None:
        """Return the path to an object of the model; None for any other."""
        if isinstance(value, nn.Module):
            name = self.modules.get(id(value))
            return None if name is None else ModelObject(name)
        return self.objects.get(id(value))

    def find_tensor(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Return (kind, name) of a tensor of the model; None for any other."""
        key = id(tensor)
        for kind, found in (("parameter", self.parameters), ("buffer", self.buffers), ("attribute", self.attributes)):
            if key in found:
                return kind, found[key]
        return None


_EMPTY = nn.Module()


def module_tensors(module: nn.Module) -> dict[int, str]:
    """Return the tensors of a module and its children by identity, those in plain attributes included."""
    found: dict[int, str] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            path = f"{name}.{key}" if name else key
            if isinstance(value, torch.Tensor):
                found[id(value)] = path
            elif key in ("_parameters", "_buffers"):
                found.update((id(tensor), "") for tensor in value.values() if tensor is not None)
            elif key not in vars(_EMPTY) and isinstance(value, (list, tuple, dict)):
                found.update((id(leaf), "") for _, leaf in walk(value) if isinstance(leaf, torch.Tensor))
    return found


T = TypeVar("T")


class TensorTable(Generic[T]):
    """A mapping from tensors, by identity, that does not keep them alive.

    A trace that held every tensor would need more memory than a training step. The id of a freed tensor may be reused,
    so each entry has a weak reference to its tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return the value of a tensor; None if it has no entry."""
        found = self._entries.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def add(self, tensor: torch.Tensor, value: T) -> None:
        """Add or replace an entry."""
        self._entries[id(tensor)] = weakref.ref(tensor), value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.get(tensor) is not None

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
