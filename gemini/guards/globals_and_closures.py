"""Outside: what a model's code reads that is not the model's: globals of the program, and what they hold.

    for step in range(100):
        args.tau = max(0.5, 1.0 - step / 50)    # read in a forward: F.gumbel_softmax(x, args.tau)

A worker has the code of the program's classes as it was when it was sent, with the values that it reads. They are as
good as the originals until the program changes one, or gives a class another method; then the modules whose code reads
it run in the program's process. So do those that read weights of others, whose gradients a worker could not give. What
counts is code that a forward reaches, followed by names; of an object (`args`), the attributes that are named there,
of objects in these (`cfg.model.tau`) as well, and of containers what they hold (`cfg["model"]["tau"]`). Variables
around a function count like globals, attributes of a function like those of an object, and of the environment what
code names. A dictionary that grows is a cache, which has all it needs after some calls, until it has grown too often
for one. A memoized function remembers anew in a worker, which is as good unless it draws random numbers. Modules that
hold an iterator run in the program's process, too: it goes on wherever it is asked, and cannot be put back.
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
from gemini.guards.base import Guard
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
_UNSAID = frozenset(  # methods that code calls without their names
    [
        "__call__", "__getattr__", "__getattribute__", "__getitem__", "__len__", "__iter__", "__contains__", "__bool__",
        "__float__", "__int__", "__index__", "__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
        "__rmul__", "__truediv__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__",
    ]
)  # fmt: skip
_ENVIRONMENT = frozenset(("environ", "environb", "getenv"))
_LARGE = 1000  # a container whose items are not followed
_DEEP = 4  # objects in objects that are followed
_started: dict[bytes, bytes] = {}  # the environment that workers have


def remember_environment() -> None:
    """Workers are started, and have the environment of now."""
    _started.clear()
    _started.update(_variables())


def _variables() -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
    return found


Found = dict[int, WatchedValue]
_known: dict[int, tuple[Any, dict[Any, WatchedValue]]] = {}  # of this process, by owner
_read_by: WeakKeyDictionary[type, Found] = WeakKeyDictionary()
_idle_in: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()  # attributes of libraries that no call comes to


class ExternalReads(Guard):
    """What the code of a module, and of the modules in it, reads."""

    def __init__(self, module: nn.Module) -> None:
        self._found: Found = {}
        self._told: dict[int, int] = {}  # growths of entries, by number
        self._changed = ""
        self._look: ValueSnapshot | None = None
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """See what it reads now: the program may have put other modules into it, or functions on them."""
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
        self.learners = [entry.name for entry in self.entries if entry.learns]
        self.iterators = [
            f"{type(part).__name__}.{key}"
            for part in module.modules()
            for key, value in vars(part).items()
            if key not in _INTERNAL and _may_read(part, key) and holds_iterator(value)
        ]
        self._look = self._look if len(found) == known else None
        self._memoized = [entry for entry in self.entries if isinstance(entry.value, _MEMOIZED)]
        self._growing = [entry for entry in self.entries if isinstance(entry.copied, dict) or entry.is_unset]

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - the module it was made for
        """Return why this code cannot run in a worker, or None."""
        return self.find_permanent() or next(filter(None, map(self._growth, self._growing)), None)

    def find_permanent(self) -> str:
        """Why it cannot from now on, either."""
        if self.learners:
            return f"its code reads {self.learners[0]}, which has weights and is not of the model"
        if self.iterators:  # a trial run would advance it, and nothing winds it back
            return f"it holds an iterator, {self.iterators[0]}"
        if not self._changed and (self._look is None or not self._look.holds()):
            self._changed = next((entry.name for entry in self.entries if entry.has_changed()), "")
            self._look = None if self._changed else ValueSnapshot(self.entries)
        if self._changed:
            return f"its code reads {self._changed}, which the program changes"
        drawing = next((entry.name for entry in self._memoized if uses_rng(entry.value)), "")
        return f"its code calls {drawing}, which remembers random numbers" if drawing else ""

    def _growth(self, entry: WatchedValue) -> str:
        """What is to be said of a dictionary that has grown since the last time, or of what was filled."""
        if entry.growths == self._told.get(id(entry), 0):
            return ""
        self._told[id(entry)] = entry.growths
        return f"its code reads {entry.name}, which has grown"


class _CodeReader:
    """Follows code by the names in it.

    `own`: modules and tensors of the model, by number. Functions that modules have for attributes travel with them, and
    so do such parts around these functions.
    """

    def __init__(self, own: Container[int] = ()) -> None:
        self._entries: Found = {}
        self._seen: set[int] = set()
        self._asked: set[str] = set()  # attributes that code asks for, and that may not be there
        self._own = own

    def read(self, *code: Any) -> Found:
        """What classes (their forward, where they are modules) and functions read."""
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
            called = _reached(kinds, set(_CALLED))  # a method of one class may be that of another's `self.method()`
            for kind in kinds:
                self._follow_members(kind, called if is_module else {*vars(kind)})
                self._read_members(kind.__name__, kind, called if is_module else set())
                for name in _CALLED if is_module else ():  # also where it has none yet
                    self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))

    def _follow_members(self, kind: type, named: set[str]) -> None:
        """Methods of a class, and those that they name."""
        for name in named:
            for function in functions_of(vars(kind).get(name)):
                if id(function) in self._seen or not is_user_module(function.__module__):
                    continue
                self._seen.add(id(function))
                self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))
                self._follow_function(function)
                names = names_in(function.__code__)
                self._read_members(f"{kind.__name__}.{name}", function, named | names)
                self._read_members(kind.__name__, kind, names)  # by way of `self`
                self._follow_members(kind, names)

    def _follow_function(self, function: types.FunctionType, own: Container[int] = ()) -> None:
        code, space = function.__code__, function.__globals__
        names, named = names_in(code), globals_in(code)
        if "getattr" in named or "hasattr" in named:
            self._asked |= strings_in(code)
        for name in named & space.keys():  # not `self.encoder`, where the program has an `encoder`, too
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
            ).is_changed = True  # a worker has those that code names
        if not names.isdisjoint(_ENVIRONMENT):
            self._read_environment(strings_in(code))
        self._follow(getattr(function, "__wrapped__", None), own)

    def _read(self, name: str, place: ValueLocation, names: set[str], own: Container[int] = (), depth: int = 0) -> None:
        """A value that code reads, with the names that the code reads of it."""
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
        """What code reads of a module of the program."""
        if isinstance(module, types.ModuleType) and is_user_module(module.__name__) and depth < _DEEP:
            for one in (names | {"__getattr__"}) & vars(module).keys():
                self._read(f"{name}.{one}", ValueLocation(vars(module), one), names, depth=depth + 1)

    def _read_environment(self, names: set[str]) -> None:
        """Variables of the environment; all, where their names are not in the code."""
        variables = _variables()
        before = _started or variables
        for name in names:
            key = os.fsencode(name)
            self._note(f"os.environ[{name!r}]", ValueLocation(variables, key), before.get(key, MISSING))
        if not names:
            self._note("os.environ", ValueLocation(variables, "", environment))

    def _read_object(self, name: str, value: Any, names: set[str], depth: int = 0) -> None:
        """What code reads of an object: attributes that it names, and those that methods name that it may call."""
        self._read_members(name, value, names, depth)
        kinds = [kind for kind in type(value).__mro__ if is_user_module(kind.__module__)]
        reached = _reached(kinds, names | _UNSAID)
        for kind in kinds:
            self._follow_members(kind, reached)
            self._read_members(kind.__name__, kind, names, depth + 1)  # by way of the object
        self._read_members(name, value, reached - names, depth + 1)

    def _read_members(self, name: str, owner: Any, names: set[str], depth: int = 0) -> None:
        """Values in the attributes of an object, a class or a function that code names."""
        for read in (members, slots):
            found = read(owner)
            for one in names & found.keys():
                value = found[one]
                if depth and isinstance(value, nn.Module):  # as the model itself, of the program's trainer
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
    """What a container has, or the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _entries_of(owner: Any) -> dict[Any, WatchedValue]:
    """Those that are known of an owner, as long as it lives."""
    number = id(owner)
    if number not in _known:
        _known[number] = weak_reference(owner, lambda _: _known.pop(number, None)) or owner, {}
    return _known[number][1]


def _is_object(value: Any) -> bool:
    """Whether a value is worth a look into its attributes."""
    kinds = (*PLAIN, *CONTAINERS, *_FUNCTIONS, types.ModuleType, torch.Tensor, nn.Module, np.ndarray, _MEMOIZED)
    return not isinstance(value, kinds)


def _may_read(part: nn.Module, key: str) -> bool:
    """Whether a call of a module may come to one of its attributes. What a class of a library gives its modules (the
    trainer of a LightningModule) is not for that, unless code that the call reaches names it."""
    kind = type(part)
    if kind not in _idle_in:
        kinds = [one for one in kind.__mro__ if one not in (nn.Module, object)]
        makers = [vars(one).get("__init__") for one in kinds if not is_user_module(one.__module__)]
        given = {name for maker in makers for function in functions_of(maker) for name in function.__code__.co_names}
        _idle_in[kind] = given - _reached(kinds, set(_CALLED))
    return key not in _idle_in[kind]


def _reached(kinds: list[type], names: set[str]) -> set[str]:
    """Names, with those in the methods that they name, of any of the classes."""
    reached, ahead = set(names), [*names]
    while ahead:
        name = ahead.pop()
        for function in (one for kind in kinds for one in functions_of(vars(kind).get(name))):
            more = names_in(function.__code__) - reached
            reached |= more
            ahead += more
    return reached
