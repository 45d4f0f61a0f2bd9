"""Reachable code: functions of libraries that the forward of a model's modules reaches, followed by the names in code.

User code is followed into libraries, library code within its library. Names of torch are handled separately, see
`monkeypatches`. Functions are also called through tables: dictionaries, and objects of a library class that hold some.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from gemini.purity.bytecode import functions_of, globals_in, names_in, part_of
from gemini.user_code import is_user_module

_EXCLUDED = frozenset(("torch", "numpy", "", *sys.stdlib_module_names))
_SCRIPT = "the script"
_CALLED = ("forward", "__call__")
_MADE = (
    "__init__",
    "__new__",
    "__post_init__",
    "__call__",
    "__getitem__",
    "get",
)  # called by code that only names the class


def find_reachable(kinds: Iterable[type]) -> ReachableCode:
    """Return what classes use when their modules are called."""
    reach = ReachableCode()
    for kind in kinds:
        reach.follow_members(kind, _library_of(kind.__module__), _CALLED)
    return reach


class ReachableCode:
    """Names of functions by the library module that has them, and tables by name."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = defaultdict(set)
        self.tables: list[tuple[tuple[str, str], list[dict[Any, Any]]]] = []  # by module and name
        self._seen: set[int] = set()

    def follow_members(self, kind: type, library: str, names: Iterable[str]) -> None:
        """Follow methods of a class, and those that they name."""
        for name in names if library not in _EXCLUDED else ():
            for function in functions_of(vars(kind).get(name)):
                if id(function) not in self._seen and _library_of(function.__module__) == library:
                    self._follow(function, library)
                    self.follow_members(kind, library, names_in(function.__code__))

    def _follow(self, value: Any, library: str) -> None:
        """Follow what a function reads, and what it wraps."""
        value = part_of(value, "__func__") or value
        if not isinstance(value, types.FunctionType) or id(value) in self._seen:
            return
        where = _library_of(value.__module__)
        if where in _EXCLUDED or library not in (where, _SCRIPT):
            return
        self._seen.add(id(value))
        names, space = names_in(value.__code__), value.__globals__
        for name in globals_in(value.__code__) & space.keys():
            held = space[name]
            if not isinstance(held, types.ModuleType):
                self._note((str(space.get("__name__")), name), held, where, names)
            elif _library_of(held.__name__) not in _EXCLUDED and where in (_SCRIPT, _library_of(held.__name__)):
                for one in names & vars(held).keys():
                    self._note((held.__name__, one), vars(held)[one], where, names)
        for cell in value.__closure__ or ():
            try:
                self._follow(cell.cell_contents, where)
            except ValueError:  # an empty cell
                continue
        self._follow(getattr(value, "__wrapped__", None), where)

    def _note(self, place: tuple[str, str], value: Any, library: str, names: set[str]) -> None:
        """Record a value that code has under a name in a module; `names` are the other names in that code."""
        if isinstance(value, type):
            where = _library_of(value.__module__)
            if where not in _EXCLUDED and library in (where, _SCRIPT) and not issubclass(value, nn.Module):
                self.follow_members(value, where, (*_MADE, *names))
            return
        if not is_user_module(place[0]) and (_is_function(value) or is_user_module(type(value).__module__)):
            self.found[place[0]].add(place[1])
        elif not is_user_module(place[0]) and id(value) not in self._seen:
            self._seen.add(id(value))
            self.tables.append((place, tables_of(value)))
        self._follow(value, library)


def tables_of(value: Any) -> list[dict[Any, Any]]:
    """Return the dictionaries in which code may look something up by way of a value."""
    if isinstance(value, dict):
        return [value]
    kind = type(value)
    if _library_of(kind.__module__) in _EXCLUDED or is_user_module(kind.__module__) or isinstance(value, nn.Module):
        return []
    kinds = [one for one in kind.__mro__ if _library_of(one.__module__) not in _EXCLUDED]
    held = [getattr(value, "__dict__", {}), *map(vars, kinds)]
    return [one for members in held for one in members.values() if isinstance(one, dict)]


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def _library_of(module: str | None) -> str:
    """Return the library that a module belongs to."""
    return _SCRIPT if is_user_module(module) else (module or "").partition(".")[0]
