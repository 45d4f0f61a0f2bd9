"""Outside: what a model's code reads that is not the model's: globals of the program, and what they hold.

    for step in range(100):
        args.tau = max(0.5, 1.0 - step / 50)    # read in a forward: F.gumbel_softmax(x, args.tau)

A worker has the code of the program's classes as it was when it was sent, with the values that it reads. They are as
good as the originals until the program changes one, or gives a class another method; then the modules whose code reads
it run in the program's process. So do those that read weights of others, whose gradients a worker could not give. What
counts is code that a forward reaches, followed by names; of an object (`args`), the attributes that are named there,
of objects in these (`cfg.model.tau`) as well, and of containers what they hold (`cfg["model"]["tau"]`). A
dictionary that grows is a cache, which has all it needs after some calls, until it has grown too often for one. A
memoized function remembers anew in a worker, which is as good unless it draws random numbers. Modules that hold an
iterator run in the program's process, too: it goes on wherever it is asked, and cannot be put back.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from gemini.capture.caches import draws
from gemini.capture.held import holds_iterator
from gemini.runtime.code_names import functions_of, globals_in, names_in
from gemini.runtime.transport.packing import is_the_users

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_DESCRIPTORS = (property, staticmethod, classmethod)
_INTERNAL = frozenset(vars(nn.Module()))
_MEMOIZED = functools._lru_cache_wrapper
_MISSING, _GONE = object(), object()
_CALLED = ("forward", "__call__")  # of a module
_PATIENCE = 3  # times that a dictionary may grow: then it is no cache, but a record that the program wants
_LARGE = 1000  # entries of a container that are still looked at every time
_INNER = 200  # of containers inside it
_BYTES = 1 << 16  # of an array
_DEEP = 4  # objects in objects that are followed


class Entry:
    """One value, as it was when code that reads it was first seen. It keeps neither large values nor classes alive."""

    def __init__(self, name: str, owner: Any, table: Callable[[], Mapping[Any, Any]], key: str) -> None:
        self.name, self.owner, self.table, self.key = name, owner, table, key
        value = table().get(key, _MISSING)
        self._value = _held(value)
        self.copied, self.inside = _copied(value), _inside(value)
        self.is_changed = False  # once and for all: workers may have seen either
        self.growths = 0  # times that a dictionary had more entries: a cache has all it needs after some calls

    @property
    def value(self) -> Any:
        """What it was."""
        return self._value()

    @property
    def learns(self) -> bool:
        """Whether it has weights."""
        value = self.value
        if isinstance(value, nn.Module):
            return any(one.requires_grad for one in value.parameters())
        return isinstance(value, torch.Tensor) and value.requires_grad

    def has_changed(self) -> bool:
        """Whether the program has put another value there, or changed this one."""
        if not self.is_changed:
            now, before = self.table().get(self.key, _MISSING), self._value()
            if now is before and self._has_grown(now):
                kept = _inside({key: now[key] for key in self.copied})
                self.is_changed = self.growths >= _PATIENCE or not _equal(kept, self.inside)
                self.growths, self.copied, self.inside = self.growths + 1, now.copy(), _inside(now)
            elif now is before:
                is_same = self.copied is None or _equal(_copied(now), self.copied)
                self.is_changed = not is_same or not _equal(_inside(now), self.inside)
            else:
                is_plain = isinstance(now, (*_PLAIN, *_CONTAINERS)) and type(now) is type(before)
                self.is_changed = not is_plain or not _equal(now, before)
        return self.is_changed

    def _has_grown(self, now: Any) -> bool:
        """Whether a dictionary has what it had, and more."""
        before = self.copied
        if not isinstance(now, dict) or not isinstance(before, dict) or not len(before) < len(now) < _LARGE:
            return False
        return all(now.get(key, _MISSING) is value for key, value in before.items())


Place = tuple[int, str]
_entries: dict[Place, Entry] = {}  # of this process; an entry keeps what it is of, so the number stays its own
_of_classes: WeakKeyDictionary[type, dict[str, Entry]] = WeakKeyDictionary()
_read_by: WeakKeyDictionary[type, dict[Place, Entry]] = WeakKeyDictionary()


class Outside:
    """What the code of a module, and of the modules in it, reads."""

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[Place, Entry] = {}
        self._growths: list[int] = []  # that were told
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """See what it reads now: the program may have put other modules into it, or functions on them."""
        found = self._found
        for kind in {type(part) for part in module.modules()}:
            if kind not in _read_by:
                _read_by[kind] = _Reader().read(kind)
            found |= _read_by[kind]
        for part in module.modules():
            functions = [one for one in vars(part).values() if isinstance(one, _FUNCTIONS)]
            if functions:
                found |= _Reader().read(*functions)
        self.entries = [*found.values()]
        self.learners = [entry.name for entry in self.entries if entry.learns]
        self.iterators = [
            f"{type(part).__name__}.{key}"
            for part in module.modules()
            for key, value in vars(part).items()
            if key not in _INTERNAL and holds_iterator(value)
        ]
        self._growths += [0] * (len(self.entries) - len(self._growths))

    def obstacle(self) -> str:
        """Why this code cannot run elsewhere; '' where it can."""
        return self.lasting() or next((text for at in range(len(self.entries)) if (text := self._growth(at))), "")

    def lasting(self) -> str:
        """Why it cannot from now on, either."""
        if self.learners:
            return f"its code reads {self.learners[0]}, which has weights and is not of the model"
        if self.iterators:  # a trial run would advance it, and nothing winds it back
            return f"it holds an iterator, {self.iterators[0]}"
        for entry in self.entries:
            if entry.has_changed():
                return f"its code reads {entry.name}, which the program changes"
            if isinstance(entry.value, _MEMOIZED) and draws(entry.value):
                return f"its code calls {entry.name}, which remembers random numbers"
        return ""

    def _growth(self, at: int) -> str:
        """What is to be said of a dictionary that has grown since the last time."""
        entry = self.entries[at]
        if entry.growths == self._growths[at]:
            return ""
        self._growths[at] = entry.growths
        return f"its code reads {entry.name}, which has grown"


class _Reader:
    """Follows code by the names in it."""

    def __init__(self) -> None:
        self._entries: dict[Place, Entry] = {}
        self._seen: set[int] = set()

    def read(self, *code: Any) -> dict[Place, Entry]:
        """What classes (their forward, where they are modules) and functions read."""
        for one in code:
            self._follow(one)
        return self._entries

    def _follow(self, value: Any) -> None:
        if isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, _MEMOIZED):
            value = value.__wrapped__
        if id(value) in self._seen:
            return
        if isinstance(value, types.FunctionType) and is_the_users(value.__module__):
            self._seen.add(id(value))
            self._follow_function(value)
        elif isinstance(value, type) and is_the_users(value.__module__):
            self._seen.add(id(value))
            is_module = issubclass(value, nn.Module)
            kinds = [kind for kind in value.__mro__ if is_the_users(kind.__module__)]
            called = _reached(kinds, set(_CALLED))  # a method of one class may be that of another's `self.method()`
            for kind in kinds:
                self._follow_members(kind, called if is_module else tuple(vars(kind)))
                self._read_members(kind.__name__, kind, called if is_module else set())
                for name in _CALLED if is_module else ():  # also where it has none yet
                    self._note(f"{kind.__name__}.{name}", kind, vars(kind), name)

    def _follow_members(self, kind: type, named: Iterable[str]) -> None:
        """Methods of a class, and those that they name."""
        for name in named:
            for function in functions_of(vars(kind).get(name)):
                if id(function) in self._seen or not is_the_users(function.__module__):
                    continue
                self._seen.add(id(function))
                self._note(f"{kind.__name__}.{name}", kind, vars(kind), name)
                self._follow_function(function)
                names = names_in(function.__code__)
                self._read_members(kind.__name__, kind, names)  # by way of `self`
                self._follow_members(kind, names)

    def _follow_function(self, function: types.FunctionType) -> None:
        names = names_in(function.__code__)
        for name in globals_in(function.__code__):  # not `self.encoder`, where the program has an `encoder`, too
            if name in function.__globals__:
                self._read(name, function.__globals__, name, names)
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        self._follow(getattr(function, "__wrapped__", None))

    def _read(self, name: str, table: dict[str, Any], key: str, names: set[str]) -> None:
        """A value that code reads, with the names that the code reads of it."""
        value = table[key]
        if isinstance(value, types.ModuleType):
            if is_the_users(value.__name__):
                for one in names & vars(value).keys():
                    if not isinstance(vars(value)[one], types.ModuleType):
                        self._read(f"{name}.{one}", vars(value), one, names)
            return
        self._follow(value)
        self._note(name, table, table, key)
        if _is_object(value):
            self._read_object(name, value, names)

    def _read_object(self, name: str, value: Any, names: set[str], depth: int = 0) -> None:
        """What code reads of an object: attributes that it names, and those that methods name that it may call."""
        self._read_members(name, value, names, depth)
        kinds = [kind for kind in type(value).__mro__ if is_the_users(kind.__module__)]
        reached = _reached(kinds, names | {"__call__"})
        for kind in kinds:
            self._follow_members(kind, reached)
            self._read_members(kind.__name__, kind, names, depth + 1)  # by way of the object
        self._read_members(name, value, reached - names, depth + 1)

    def _read_members(self, name: str, owner: Any, names: set[str], depth: int = 0) -> None:
        """Values in the attributes of an object, or of a class, that code names."""
        members = getattr(owner, "__dict__", {})
        for one in names & members.keys():
            value = members[one]
            if depth and isinstance(value, nn.Module):  # as the model itself, of the program's trainer
                continue
            is_plain = not callable(value) and not isinstance(value, _DESCRIPTORS)
            if is_plain or isinstance(value, _MEMOIZED):
                self._note(f"{name}.{one}", owner, members, one)
            if depth < _DEEP and _is_object(value) and not isinstance(value, (type, *_DESCRIPTORS)):
                self._read_object(f"{name}.{one}", value, names, depth + 1)

    def _note(self, name: str, owner: Any, table: Mapping[Any, Any], key: str) -> None:
        place = id(owner), key
        if isinstance(owner, type):
            known, members = _of_classes.setdefault(owner, {}), partial(_members, weakref.ref(owner))
            if key not in known:
                known[key] = Entry(name, None, members, key)
            self._entries[place] = known[key]
            return
        if place not in _entries:
            _entries[place] = Entry(name, owner, lambda: table, key)
        self._entries[place] = _entries[place]


def _members(kind: weakref.ref[type]) -> Mapping[str, Any]:
    """Those of a class; none where it is gone."""
    found = kind()
    return {} if found is None else vars(found)


def _held(value: Any) -> Callable[[], Any]:
    """What gives a value, but does not keep one that may be large, or hold classes and models."""
    if not isinstance(value, (types.FunctionType, type, torch.Tensor, nn.Module)):
        return lambda: value
    found = weakref.ref(value)

    def get() -> Any:
        still = found()
        return _GONE if still is None else still

    return get


def _is_object(value: Any) -> bool:
    """Whether a value is worth a look into its attributes."""
    kinds = (*_PLAIN, *_CONTAINERS, *_FUNCTIONS, types.ModuleType, torch.Tensor, nn.Module, np.ndarray, _MEMOIZED)
    return not isinstance(value, kinds)


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


def _inside(value: Any) -> Any:
    """What an array holds, or the containers and arrays in a container; None where there are none."""
    if isinstance(value, (np.ndarray, deque)):
        return _contents(value, [_LARGE])
    if not isinstance(value, (list, tuple, dict)) or len(value) >= _LARGE:
        return None
    room = [_INNER]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    holders = (list, tuple, dict, set, deque, np.ndarray, torch.Tensor)
    return {key: _contents(part, room) for key, part in parts if isinstance(part, holders)} or None


def _contents(value: Any, room: list[int]) -> Any:
    """What can be compared later, and keeps nothing: of a tensor its version, of other objects their identity."""
    room[0] -= 1
    if room[0] < 0:
        return None
    if isinstance(value, torch.Tensor):
        return id(value), _copied(value)
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes()) if value.nbytes <= _BYTES else id(value)
    if isinstance(value, dict):
        return {key: _contents(part, room) for key, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_contents(part, room) for part in value]
    if isinstance(value, set):
        return value.copy()
    return value if isinstance(value, _PLAIN) else id(value)


def _copied(value: Any) -> Any:
    """What shows that a value has been changed in place; None where nothing does."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, ContextVar):
        return (value.get(None),)
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [one.training for one in value.modules()], [(id(one), one._version) for one in tensors]
    if isinstance(value, types.FunctionType):  # as tools that load code again change it
        return value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, (list, dict, set)) and len(value) < _LARGE:
        return value.copy()
    return None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared
        return False
