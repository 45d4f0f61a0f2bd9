"""Module state: the Python state of a module, to detect that it has changed.

A worker has a copy of every module that it runs. The copy is valid as long as nothing but tensors in shared memory
changes: attributes, containers in attributes, configurations, loose tensors, replaced buffers. Both sides check in
every call, so a check must be cheap: almost all of it is one comparison of dictionaries per module, which compares
identities for unchanged values.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from itertools import chain
from operator import is_, methodcaller, ne
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.guards.base import ChangeGuard
from gemini.ir.encode import walk
from gemini.purity.value_watch import TensorContents
from gemini.snapshot.attribute_values import copy_contents, is_unchanged, iter_mutable, tensors_in

_CONTAINERS = (list, dict, set)
_SOURCES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")  # scripted modules have dictionary-like tables
_EVERY = frozenset(vars(nn.Module()))  # attributes that every module has
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Module, type)


class ModuleState(ChangeGuard):
    """The state of a module and its submodules at one time."""

    def __init__(self, module: nn.Module) -> None:
        self.root = module
        self.take()

    def take(self) -> None:
        """Record the current state."""
        self.modules = list(self.root.modules())
        self.states = [
            (vars(module), dict(vars(module)), module._buffers, dict(module._buffers), module._parameters,
             dict(module._parameters), module._modules, dict(module._modules))
            for module in self.modules
        ]  # fmt: skip
        # The same in flat lists, for the usual case: loops in C detect that nothing has changed.
        self._classes = [*map(type, self.modules)]
        self._own = [own for own, *_ in self.states]
        self._before = [before for _, before, *_ in self.states]
        self._tables = [table for state in self.states for table in (state[2], state[4], state[6])]
        self._lengths, self._names = [*map(len, self._tables)], [*chain.from_iterable(map(_KEYS, self._tables))]
        self._tensors = [*chain.from_iterable(map(_VALUES, self._tables))]
        values = [value for own, *_ in self.states for value in own.values()]
        internal = {id(part) for module in self.modules for part in _internal(module)}
        held = [(name, value) for own, *_ in self.states for name, value in own.items() if id(value) not in internal]
        inside = {id(live): live for name, value in held if name not in _EVERY for live in iter_mutable(value)}
        self._inside = [(live, copy_contents(live)) for live in inside.values()]
        self._hooks = [value for name, value in held if _is_container(value) and name in _EVERY]
        self._hooked = [*map(len, self._hooks)]
        registered = {id(tensor) for tensor in (*self.root.parameters(), *self.root.buffers())} | internal
        self._holders = [
            (own, key)
            for own, *_ in self.states
            for key, value in own.items()
            if any(id(one) not in registered for one in _loose(value, internal))
        ]
        self._found = [*self._loose_now()]
        self.loose = [
            (tensor, TensorContents(tensor), tensor.requires_grad)
            for tensor in (*self._found, *(one for _, saved in self._inside for one in tensors_in(saved)))
            if not tensor.is_inference() and id(tensor) not in registered
        ]
        self.sources = [(value, source_state(value)) for value in values if is_source(value)]
        self.objects = [(vars(value), dict(vars(value))) for value in values if _is_object(value)]

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - the module it was made for
        """Return what has changed, or None."""
        return self.find_change() or None

    def find_change(self, attributes_hold: bool = False) -> str:
        """Return what has changed, in words; '' if nothing has. Training flags do not count.

        `attributes_hold`: attributes, parameters, buffers and hooks are known to be unchanged.
        """
        if not attributes_hold and [*map(len, self._hooks)] != self._hooked:
            return "it has other hooks"
        if not attributes_hold and [*map(type, self.modules)] != self._classes:
            return "a module is of another class"
        if not attributes_hold and not self._are_modules_unchanged():
            for module, state in zip(self.modules, self.states, strict=True):
                own, before, buffers, held, parameters, named, children, parts = state
                if not _equal(own, before) and not _only_training(own, before):
                    return f"attributes of a {type(module).__name__} have changed"
                if not _identical(buffers, held) or not _identical(parameters, named):
                    return f"a {type(module).__name__} has other tensors"
                if not _identical(children, parts):
                    return f"a {type(module).__name__} has other modules in it"
        if (self._holders or self.loose) and not self._are_loose_unchanged():
            return "a tensor in an attribute has changed"
        if self.sources and any(source_state(value) != state for value, state in self.sources):
            return "a generator in an attribute has advanced"
        if self.objects and not all(_equal(own, before) for own, before in self.objects):
            return "an object in an attribute has changed"
        if self._inside and not all(is_unchanged(live, before) for live, before in self._inside):
            return "the contents of an attribute have changed"
        return ""

    def _loose_now(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(_loose(own.get(key)) for own, key in self._holders)

    def _are_loose_unchanged(self) -> bool:
        """Return whether tensors in attributes are the same objects, unwritten, with the same requires_grad.

        Writes through `.data` and NumPy do not count as versions, so contents are compared.
        """
        now = [*self._loose_now()]
        if len(now) != len(self._found) or not all(map(is_, now, self._found)):
            return False
        return all(one.requires_grad == learns and saved.are_those_of(one) for one, saved, learns in self.loose)

    def _are_modules_unchanged(self) -> bool:
        """Return whether attributes, parameters and buffers are certainly unchanged."""
        try:
            if any(map(ne, self._own, self._before)):
                return False
        except Exception:  # see _equal
            return False
        if [*map(len, self._tables)] != self._lengths or [
            *chain.from_iterable(map(_KEYS, self._tables))
        ] != self._names:
            return False
        return all(map(is_, chain.from_iterable(map(_VALUES, self._tables)), self._tensors))


def is_source(value: Any) -> bool:
    """Return whether a value is a random number generator."""
    return isinstance(value, _SOURCES)


def source_state(value: Any) -> Any:
    """Return the state of a generator in a comparable form."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    return repr(value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False))


def _internal(module: nn.Module) -> list[Any]:
    """Return the dictionaries that every module has."""
    return [module._parameters, module._buffers, module._modules]


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (*_PLAIN, *_CONTAINERS)) and not callable(value) and hasattr(value, "__dict__")


def _loose(value: Any, internal: Container[int] = ()) -> list[torch.Tensor]:
    """Return the tensors that an attribute holds, itself or in containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple, dict)) or not value or id(value) in internal:
        return []
    return [leaf for _, leaf in walk(value) if isinstance(leaf, torch.Tensor)]


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    try:
        return now == before
    except Exception:  # values that cannot be compared are different objects
        return False


def _only_training(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if now.keys() != before.keys() or now.get("training") == before.get("training"):
        return False
    return _equal({**now, "training": None}, {**before, "training": None})


def _identical(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(now.get(key) is value for key, value in before.items())
