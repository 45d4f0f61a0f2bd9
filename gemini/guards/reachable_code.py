"""Reach: the functions of libraries that the forward of a model's modules comes to, followed by the names in its code.

Code of the program is followed into libraries, that of a library within it. Names of torch are looked at elsewhere.
Functions are also called by way of tables: dictionaries, and objects of a library's class that have some.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from gemini.guards.bytecode import functions_of, globals_in, names_in, part_of
from gemini.user_code import is_user_module

_LEFT_OUT = frozenset(("torch", "numpy", "", *sys.stdlib_module_names))
_PROGRAM = "the program"
_CALLED = ("forward", "__call__")
_MADE = ("__init__", "__new__", "__post_init__", "__call__", "__getitem__", "get")  # by code that names a class alone


def find_reachable(kinds: Iterable[type]) -> ReachableCode:
    """What classes use when modules are called."""
    reach = ReachableCode()
    for kind in kinds:
        reach.follow_members(kind, _home(kind.__module__), _CALLED)
    return reach


class ReachableCode:
    """Names of functions by the module of a library that has them, and tables by name."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = defaultdict(set)
        self.tables: list[tuple[str, dict[Any, Any]]] = []
        self._seen: set[int] = set()

    def follow_members(self, kind: type, home: str, names: Iterable[str]) -> None:
        """Methods of a class, and those that they name."""
        for name in names if home not in _LEFT_OUT else ():
            for function in functions_of(vars(kind).get(name)):
                if id(function) not in self._seen and _home(function.__module__) == home:
                    self._follow(function, home)
                    self.follow_members(kind, home, names_in(function.__code__))

    def _follow(self, value: Any, home: str) -> None:
        """What a function reads, and what it is wrapped around."""
        value = part_of(value, "__func__") or value
        if not isinstance(value, types.FunctionType) or id(value) in self._seen:
            return
        where = _home(value.__module__)
        if where in _LEFT_OUT or home not in (where, _PROGRAM):
            return
        self._seen.add(id(value))
        names, space = names_in(value.__code__), value.__globals__
        for name in globals_in(value.__code__) & space.keys():
            held = space[name]
            if not isinstance(held, types.ModuleType):
                self._note((str(space.get("__name__")), name), held, where, names)
            elif _home(held.__name__) not in _LEFT_OUT and where in (_PROGRAM, _home(held.__name__)):
                for one in names & vars(held).keys():
                    self._note((held.__name__, one), vars(held)[one], where, names)
        for cell in value.__closure__ or ():
            try:
                self._follow(cell.cell_contents, where)
            except ValueError:  # not filled yet
                continue
        self._follow(getattr(value, "__wrapped__", None), where)

    def _note(self, place: tuple[str, str], value: Any, home: str, names: set[str]) -> None:
        """A value that code has by a name in a module, with the other names in that code."""
        if isinstance(value, type):
            where = _home(value.__module__)
            if where not in _LEFT_OUT and home in (where, _PROGRAM) and not issubclass(value, nn.Module):
                self.follow_members(value, where, (*_MADE, *names))
            return
        if not is_user_module(place[0]) and (_is_function(value) or is_user_module(type(value).__module__)):
            self.found[place[0]].add(place[1])
        elif not is_user_module(place[0]) and id(value) not in self._seen:
            self._seen.add(id(value))
            self.tables += [(".".join(place), one) for one in _tables(value)]
        self._follow(value, home)


def _tables(value: Any) -> list[dict[Any, Any]]:
    """The dictionaries in which code that has a value may look something up."""
    if isinstance(value, dict):
        return [value]
    kind = type(value)
    if _home(kind.__module__) in _LEFT_OUT or is_user_module(kind.__module__) or isinstance(value, nn.Module):
        return []
    kinds = [one for one in kind.__mro__ if _home(one.__module__) not in _LEFT_OUT]
    held = [getattr(value, "__dict__", {}), *map(vars, kinds)]
    return [one for members in held for one in members.values() if isinstance(one, dict)]


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def _home(module: str | None) -> str:
    """The library that a module is of."""
    return _PROGRAM if is_user_module(module) else (module or "").partition(".")[0]
