"""Globals and closures: values outside the model that its code reads, and whether the script changes them.

    for step in range(100):
        args.tau = max(0.5, 1.0 - step / 50)    # read in a forward: F.gumbel_softmax(x, args.tau)

A worker has the code of user classes as it was when it was sent, with the values that it reads. They are valid until
the script changes one, or replaces a method of a class; then the modules whose code reads it run in the controller. So
do modules that read weights of other models, whose gradients a worker could not return. What counts is code that a
forward reaches, followed by names: of an object (`args`) the attributes that are named there, of nested objects
(`cfg.model.tau`) as well, and of containers their contents (`cfg["model"]["tau"]`). Variables around a function count
like globals, attributes of a function like those of an object, and of the environment the variables that code names. A
dictionary that grows is a cache, complete after some calls, until it has grown too often for one. A memoized function
starts with an empty cache in a worker, which is equivalent unless it draws random numbers. Modules that hold an
iterator run in the controller, too: it advances wherever it is used, and cannot be reset.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Container, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from gemini.capture.memoized import uses_rng
from gemini.guards.base import ChangeGuard
from gemini.guards.bytecode import functions_of, globals_in, imports_in, names_in, strings_in
from gemini.guards.value_watch import (
    CONTAINERS,
    MISSING,
    NOW,
    PLAIN,
    ValueLocation,
    ValueSnapshot,
    WatchedValue,
    cells,
    environment,
    members,
    slots,
    weak_reference,
)
from gemini.snapshot.attribute_values import holds_iterator
from gemini.user_code import is_user_module

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_DESCRIPTORS = (property, staticmethod, classmethod)
_INTERNAL = frozenset(vars(nn.Module()))
_MEMOIZED = functools._lru_cache_wrapper
_CALLED = ("forward", "__call__")  # of a module
_UNSAID = frozenset(  # methods that code calls without naming them
    [
        "__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__contains__", "__bool__",
        "__float__", "__int__", "__index__", "__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
        "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__",
    ]
)  # fmt: skip
_ENVIRONMENT = frozenset(("environ", "environb", "getenv"))
_LARGE = 1000  # items of a container, from which on they are not followed
_DEEP = 4  # depth to which nested objects are followed
_started: dict[bytes, bytes] = {}  # the environment of the workers


def remember_environment() -> None:
    """Record the environment with which workers are started."""
    _started.clear()
    _started.update(_variables())


def _variables() -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return found


Found = dict[int, WatchedValue]
_known: dict[int, tuple[Any, dict[Any, WatchedValue]]] = {}  # watched values of this process, by owner
_read_by: WeakKeyDictionary[type, Found] = WeakKeyDictionary()
_idle_in: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()  # attributes of library classes that no call reaches


class ExternalReads(ChangeGuard):
    """The values that the code of a module and its submodules reads."""

    def __init__(self, module: nn.Module) -> None:
        self._found: Found = {}
        self._reported: dict[int, int] = {}  # reported growths of values, by id
        self._changed = ""
        self._snapshot: ValueSnapshot | None = None
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """Inspect what the code reads now: the script may have added modules to it, or functions to them."""
        found, known = self._found, len(self._found)
        for kind in {type(part) for part in module.modules()}:
            if kind not in _read_by:
                _read_by[kind] = _CodeReader().read(kind)
            found |= _read_by[kind]
        own = {id(one) for parts in (module.modules, module.parameters, module.buffers) for one in parts()}
        for part in module.modules():
            functions = [one for one in vars(part).values() if isinstance(one, _FUNCTIONS)]
            if functions:
                found |= _CodeReader(own).read(*functions)
        self.entries = [*found.values()]
        self.trainable = [entry.name for entry in self.entries if entry.has_weights]
        self.iterators = [
            f"{type(part).__name__}.{key}"
            for part in module.modules()
            for key, value in vars(part).items()
            if key not in _INTERNAL and _may_read(part, key) and holds_iterator(value)
        ]
        self._snapshot = self._snapshot if len(found) == known else None
        self._memoized = [entry for entry in self.entries if isinstance(entry.value, _MEMOIZED)]
        self._growing = [entry for entry in self.entries if isinstance(entry.copied, dict) or entry.is_unset]

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - the module it was made for
        """Return why this code cannot run in a worker, or None."""
        return self.find_permanent() or next(filter(None, map(self._growth, self._growing)), None)

    def find_permanent(self) -> str:
        """Return why this code can never run in a worker again; '' if it can."""
        if self.trainable:
            return f"its code reads {self.trainable[0]}, which has weights and is not part of the model"
        if self.iterators:  # a trial run would advance it, and nothing resets it
            return f"it holds an iterator, {self.iterators[0]}"
        if not self._changed and (self._snapshot is None or not self._snapshot.holds()):
            self._changed = next((entry.name for entry in self.entries if entry.has_changed()), "")
            self._snapshot = None if self._changed else ValueSnapshot(self.entries)
        if self._changed:
            return f"its code reads {self._changed}, which the script changes"
        drawing = next((entry.name for entry in self._memoized if uses_rng(entry.value)), "")
        return f"its code calls {drawing}, which caches random numbers" if drawing else ""

    def _growth(self, entry: WatchedValue) -> str:
        """Return that a dictionary has grown since the last check, or that a missing value was set; '' otherwise."""
        if entry.growths == self._reported.get(id(entry), 0):
            return ""
        self._reported[id(entry)] = entry.growths
        return f"its code reads {entry.name}, which has grown"


class _CodeReader:
    """Follows code by the names in it.

    `own`: modules and tensors of the model, by id. Functions in attributes of modules are sent with them, and so are
    such parts around these functions.
    """

    def __init__(self, own: Container[int] = ()) -> None:
        self._entries: Found = {}
        self._seen: set[int] = set()
        self._asked: set[str] = set()  # attributes that code queries and that may be missing
        self._own = own

    def read(self, *code: Any) -> Found:
        """Return what classes (their forward, if they are modules) and functions read."""
        for one in code:
            self._follow(one, self._own)
        return self._entries

    def _follow(self, value: Any, own: Container[int] = ()) -> None:
        if isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, _MEMOIZED):
            value = value.__wrapped__
        elif isinstance(value, functools.partial):
            value = value.func
        if id(value) in self._seen:
            return
        if isinstance(value, types.FunctionType) and is_user_module(value.__module__):
            self._seen.add(id(value))
            self._follow_function(value, own)
        elif isinstance(value, type) and is_user_module(value.__module__):
            self._seen.add(id(value))
            is_module = issubclass(value, nn.Module)
            kinds = [kind for kind in value.__mro__ if is_user_module(kind.__module__)]
            called = _reachable_names(kinds, set(_CALLED))  # a class may call a method of another as `self.method()`
            for kind in kinds:
                self._follow_members(kind, called if is_module else {*vars(kind)})
                self._read_members(kind.__name__, kind, called if is_module else set())
                for name in _CALLED if is_module else ():  # also if it has none yet
                    self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))

    def _follow_members(self, kind: type, named: set[str]) -> None:
        """Follow methods of a class, and those that they name."""
        for name in named:
            for function in functions_of(vars(kind).get(name)):
                if id(function) in self._seen or not is_user_module(function.__module__):
                    continue
                self._seen.add(id(function))
                self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))
                self._follow_function(function)
                names = names_in(function.__code__)
                self._read_members(f"{kind.__name__}.{name}", function, named | names)
                self._read_members(kind.__name__, kind, names)  # through `self`
                self._follow_members(kind, names)

    def _follow_function(self, function: types.FunctionType, own: Container[int] = ()) -> None:
        code, space = function.__code__, function.__globals__
        names, named = names_in(code), globals_in(code)
        if "getattr" in named or "hasattr" in named:
            self._asked |= strings_in(code)
        for name in named & space.keys():  # not `self.encoder`, if the script has a global `encoder`
            self._read(name, ValueLocation(space, name), names)
        for name in imports_in(code):
            module = sys.modules.get(name) or sys.modules.get(f"{space.get('__package__')}.{name}")
            self._read_module(name, module, names)
        for name, value in cells(function).items():
            if name != "__class__" and not any(id(one) in own for one in _items(value)):
                self._read(name, ValueLocation(function, name, cells), names, own)
        if "globals" in named:
            self._note(
                "globals()", ValueLocation(space, "globals()")
            ).is_changed = True  # a worker only has those that code names
        if not names.isdisjoint(_ENVIRONMENT):
            self._read_environment(strings_in(code))
        self._follow(getattr(function, "__wrapped__", None), own)

    def _read(self, name: str, place: ValueLocation, names: set[str], own: Container[int] = (), depth: int = 0) -> None:
        """Record a value that code reads, with the names that the code reads of it."""
        value = place.read(place.owner)[place.key]
        if isinstance(value, types.ModuleType):
            self._read_module(name, value, names, depth)
            return
        self._follow(value, own)
        self._note(name, place)
        if isinstance(value, types.FunctionType):
            self._read_members(name, value, names)
        elif isinstance(value, (list, tuple, dict)):
            for one in _items(value) if len(value) < _LARGE else ():
                self._follow(one)
        elif _is_object(value):
            self._read_object(name, value, names)

    def _read_module(self, name: str, module: Any, names: set[str], depth: int = 0) -> None:
        """Record what code reads of a user module."""
        if isinstance(module, types.ModuleType) and is_user_module(module.__name__) and depth < _DEEP:
            for one in (names | {"__getattr__"}) & vars(module).keys():
                self._read(f"{name}.{one}", ValueLocation(vars(module), one), names, depth=depth + 1)

    def _read_environment(self, names: set[str]) -> None:
        """Record environment variables; all, if their names are not in the code."""
        variables = _variables()
        before = _started or variables
        for name in names:
            key = os.fsencode(name)
            self._note(f"os.environ[{name!r}]", ValueLocation(variables, key), before.get(key, MISSING))
        if not names:
            self._note("os.environ", ValueLocation(variables, "", environment))

    def _read_object(self, name: str, value: Any, names: set[str], depth: int = 0) -> None:
        """Record what code reads of an object: attributes that it names, or that methods which it may call name."""
        self._read_members(name, value, names, depth)
        kinds = [kind for kind in type(value).__mro__ if is_user_module(kind.__module__)]
        reached = _reachable_names(kinds, names | _UNSAID)
        for kind in kinds:
            self._follow_members(kind, reached)
            self._read_members(kind.__name__, kind, names, depth + 1)  # through the object
        self._read_members(name, value, reached - names, depth + 1)

    def _read_members(self, name: str, owner: Any, names: set[str], depth: int = 0) -> None:
        """Record values in the attributes of an object, a class or a function that code names."""
        for read in (members, slots):
            found = read(owner)
            for one in names & found.keys():
                value = found[one]
                if depth and isinstance(value, nn.Module):  # such as the model itself, in a trainer
                    continue
                is_plain = not callable(value) and not isinstance(value, _DESCRIPTORS)
                if is_plain or isinstance(value, _MEMOIZED):
                    self._note(f"{name}.{one}", ValueLocation(owner, one, vars if read is members else read))
                if depth < _DEEP and _is_object(value) and not isinstance(value, (type, *_DESCRIPTORS)):
                    self._read_object(f"{name}.{one}", value, names, depth + 1)
        absent = names & self._asked - members(owner).keys() if type(owner).__dictoffset__ else ()
        for one in absent:
            self._note(f"{name}.{one}", ValueLocation(owner, one, vars))

    def _note(self, name: str, place: ValueLocation, value: Any = NOW) -> WatchedValue:
        known = _entries_of(place.owner)
        if place[1:] not in known:
            known[place[1:]] = WatchedValue(name, place, value)
        entry = known[place[1:]]
        self._entries[id(entry)] = entry
        return entry


def _items(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _entries_of(owner: Any) -> dict[Any, WatchedValue]:
    """Return the watched values of an owner, for as long as it lives."""
    number = id(owner)
    if number not in _known:
        _known[number] = weak_reference(owner, lambda _: _known.pop(number, None)) or owner, {}
    return _known[number][1]


def _is_object(value: Any) -> bool:
    """Return whether the attributes of a value are inspected."""
    kinds = (*PLAIN, *CONTAINERS, *_FUNCTIONS, types.ModuleType, torch.Tensor, nn.Module, np.ndarray, _MEMOIZED)
    return not isinstance(value, kinds)


def _may_read(part: nn.Module, key: str) -> bool:
    """Return whether a call of a module may reach one of its attributes.

    Attributes that a library class sets on its modules (the trainer of a LightningModule) count only if code that the
    call reaches names them.
    """
    kind = type(part)
    if kind not in _idle_in:
        kinds = [one for one in kind.__mro__ if one not in (nn.Module, object)]
        makers = [vars(one).get("__init__") for one in kinds if not is_user_module(one.__module__)]
        given = {name for maker in makers for function in functions_of(maker) for name in function.__code__.co_names}
        _idle_in[kind] = given - _reachable_names(kinds, set(_CALLED))
    return key not in _idle_in[kind]


def _reachable_names(kinds: list[type], names: set[str]) -> set[str]:
    """Return names, with those in the methods that they name, of any of the classes."""
    reached, ahead = set(names), [*names]
    while ahead:
        name = ahead.pop()
        for function in (one for kind in kinds for one in functions_of(vars(kind).get(name))):
            more = names_in(function.__code__) - reached
            reached |= more
            ahead += more
    return reached
