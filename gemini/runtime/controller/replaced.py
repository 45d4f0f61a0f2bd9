"""Replaced: functions of torch, and methods of libraries' classes, that the program has put others in the place of.

Workers import torch and libraries as they are, and would call what was there before.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from itertools import compress, count
from operator import is_not
from typing import Any

import torch
from torch import nn

from gemini.runtime.transport.packing import is_the_users

_OWN = ("torch", "gemini", "typing_extensions")  # whose functions are torch's, or do as they do
_EVERY = 32  # calls: the names of torch itself are many, and are looked at now and then only


class _Names:
    """The names of a module or class, as they were when they were last looked at."""

    def __init__(self, name: str, space: Mapping[str, Any], root: str = "torch") -> None:
        self.name, self._space, self._root = name, space, root
        self._values: list[Any] = []
        self._found = ""

    def replaced(self) -> str:
        """One that the program has replaced; '' where it has none."""
        values = [*self._space.values()]
        if len(values) != len(self._values) or any(map(is_not, values, self._values)):
            foreign = compress(self._space, map(self._is_foreign, self._space, values))
            self._values, self._found = values, next(foreign, "")
        return f"{self.name}.{self._found}" if self._found else ""

    def _is_foreign(self, name: str, value: Any) -> bool:
        if isinstance(value, functools.partial):  # torch has none
            return True
        if isinstance(value, types.MethodType):
            return self._is_foreign(name, value.__func__)
        if not isinstance(value, types.FunctionType):
            return False
        module = str(value.__globals__.get("__name__", ""))
        if is_the_users(module):
            return True
        is_known = _root(module) in (self._root, *_OWN) or _root(module) in sys.stdlib_module_names
        return not is_known and value.__qualname__ != f"{self.name}.{name}"  # decorators leave names as they were


class Methods:
    """Those of the classes that workers import, of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for part in model.modules() for kind in type(part).__mro__}
        found = [kind for kind in kinds if kind not in (nn.Module, object) and not is_the_users(kind.__module__)]
        self._names = [_Names(kind.__qualname__, vars(kind), _root(kind.__module__)) for kind in found]

    def obstacle(self) -> str:
        """Why they cannot run elsewhere, as the program has replaced one; '' where it has none."""
        found = next(filter(None, map(_Names.replaced, self._names)), "")
        return f"the program has replaced {found}" if found else ""


_calls = count()
_functional = _Names("torch.nn.functional", vars(torch.nn.functional))
_tensor, _torch = _Names("torch.Tensor", vars(torch.Tensor)), _Names("torch", vars(torch))


def replaced() -> str:
    """A function of torch that the program has replaced, by name; '' where there is none."""
    found = _functional.replaced() or _tensor.replaced()
    return found or (_torch.replaced() if next(_calls) % _EVERY == 0 else "")


def _root(name: str) -> str:
    return name.partition(".")[0]
