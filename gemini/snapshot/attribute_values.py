"""Attribute values: the mutable parts of an attribute, copied, compared and restored in place.

These are containers and objects at any depth, also in tuples; closure cells of user functions; NumPy arrays; random
number generators. Copies are shallow: each nested container is copied separately.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

_CONTAINERS = (list, dict, set, deque)
_PLAIN = (str, int, float, bool, type(None))  # subclasses may hold attributes
_FIXED = (tuple, frozenset)  # immutable containers of possibly mutable items
_LIBRARIES = (  # Gemini included
    *{sysconfig.get_path(one) + os.sep for one in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
_NAMESPACES = frozenset({"__main__", "types", "argparse", "collections"})
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MAX_ITEMS = 10_000  # larger containers are data, and are not entered
_MAX_BYTES = 1 << 20  # larger arrays are data
MISSING: Any = object()


class SlotAttributes:
    """The attributes of an object with `__slots__`."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner, self.names = owner, names

    def values(self) -> dict[str, Any]:
        """Return the attributes that are set."""
        return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}


def iter_mutable(value: Any) -> Iterator[Any]:
    """Yield the mutable parts of a value, at any depth."""
    return (live for _, found in _walk(value) for live in found)


def callable_state(value: Any) -> list[Any]:
    """Return the state of a user callable: closure variables, the object of a method, attributes."""
    return [
        one
        for one in (*map(copy_contents, _mutable_parts(value)), *_fixed_parts(value))
        if one is not None and one != {}
    ]


def generators(value: Any) -> list[torch.Generator]:
    """Return the torch generators that a value is or contains."""
    return [one for one, _ in _walk(value) if isinstance(one, torch.Generator)]


def _walk(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a value and everything it contains, at any depth, each with its mutable parts."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < _MAX_ITEMS:
        one = waiting.pop()
        if id(one) in seen or type(one) in _PLAIN or isinstance(one, torch.Tensor):
            continue
        seen.add(id(one))
        found = [*_mutable_parts(one)]
        yield one, found
        for live in found:
            waiting += _items(live)
        waiting += _fixed_parts(one)


def _fixed_parts(value: Any) -> list[Any]:
    """Return the fixed parts of a value: items of a tuple, the object of a method, the arguments of a partial."""
    if isinstance(value, _FIXED):
        return [*value] if len(value) <= _MAX_ITEMS else []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType) and _is_user_module(value.__module__):
        return [value.__defaults__, value.__kwdefaults__]
    return []


def _mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the mutable parts of a value: itself, its attributes, and the closure cells of a function."""
    if isinstance(value, (*_CONTAINERS, *_SOURCES, bytearray)):
        yield value
    elif isinstance(value, np.ndarray):
        if value.nbytes <= _MAX_BYTES and value.flags.writeable:
            yield value
    elif isinstance(value, types.MethodType):
        yield from _mutable_parts(value.__func__)
        yield from _mutable_parts(value.__self__)
    elif isinstance(value, types.BuiltinMethodType):
        yield from _mutable_parts(value.__self__)
    elif isinstance(value, types.FunctionType):
        if _is_user_module(value.__module__):
            yield from value.__closure__ or ()
            yield vars(value)
    elif not isinstance(value, (nn.Module, type)) and _may_hold_state(type(value).__module__):
        if isinstance(own := getattr(value, "__dict__", None), dict):
            yield own
        if names := slots_of(type(value)):
            yield SlotAttributes(value, names)


def slots_of(kind: type) -> list[str]:
    """Return the slots of instances of a class."""
    return [name for one in kind.__mro__ for name in _slots(one)]


def _slots(kind: type) -> list[str]:
    """Return the slots that a class adds."""
    names = vars(kind).get("__slots__", ())
    own = [names] if isinstance(names, str) else list(names)
    return [name for name in own if isinstance(vars(kind).get(name), types.MemberDescriptorType)]


def _is_user_module(module: str | None) -> bool:
    """Return whether a module is user code, and not a library. Workers do not import user modules."""
    if module == "__main__" or (module and module not in sys.modules):
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return bool(file) and not file.startswith(_LIBRARIES)


def _may_hold_state(module: str) -> bool:
    """Return whether instances of a module's classes may hold state of a forward that is safe to restore.

    Objects of libraries may be in use by other threads: restoring them would undo the writes of these.
    """
    return module in _NAMESPACES or _is_user_module(module)


def _items(live: Any) -> list[Any]:
    if isinstance(live, SlotAttributes):
        return [*live.values().values()]
    if isinstance(live, types.CellType):
        return [copy_contents(live)]
    if not isinstance(live, _CONTAINERS) or len(live) > _MAX_ITEMS:
        return []
    return [*live.values()] if isinstance(live, dict) else [*live]


def copy_contents(live: Any) -> Any:
    """Return a shallow copy of a mutable part, as a plain container: a subclass may copy itself into another type."""
    if isinstance(live, SlotAttributes):
        return live.values()
    if isinstance(live, types.CellType):
        try:
            return live.cell_contents
        except ValueError:  # not set yet
            return MISSING
    if isinstance(live, (np.ndarray, bytearray)):
        return live.copy()
    if isinstance(live, random.Random):
        return live.getstate()
    if isinstance(live, np.random.Generator):
        return live.bit_generator.state
    if isinstance(live, np.random.RandomState):
        return live.get_state(legacy=False)
    if isinstance(live, torch.Generator):
        return live.get_state()
    return next(kind(live) for kind in _CONTAINERS if isinstance(live, kind))


def tensors_in(saved: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a copy whose writes torch counts."""
    items = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, deque)) else [saved]
    for one in items:
        if isinstance(one, torch.Tensor) and not one.is_inference():
            yield one


def is_unchanged(live: Any, saved: Any) -> bool:
    """Return whether a mutable part equals its saved copy."""
    if isinstance(live, np.ndarray):
        return bool(live.shape == saved.shape and live.tobytes() == saved.tobytes())
    if isinstance(live, torch.Generator):
        return bool(torch.equal(live.get_state(), saved))
    if isinstance(live, (np.random.Generator, np.random.RandomState)):
        return repr(copy_contents(live)) == repr(saved)
    if isinstance(live, types.CellType):
        now = copy_contents(live)
        return now is saved or plain_equal(now, saved)
    if isinstance(live, (random.Random, bytearray)):
        return bool(copy_contents(live) == saved)
    return _have_same_items(live.values() if isinstance(live, SlotAttributes) else live, saved)


def _have_same_items(a: Any, b: Any) -> bool:
    if not isinstance(a, type(b)) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        if all(map(is_, a, b)) and all(map(is_, a.values(), b.values())):  # the usual case; a loop in C
            return True
        return all(key in b and (b[key] is value or plain_equal(b[key], value)) for key, value in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(map(is_, a, b)) or all(x is y or plain_equal(x, y) for x, y in zip(a, b, strict=True))


def plain_equal(a: Any, b: Any) -> bool:
    """Return whether two plain values, or tuples of these, are equal."""
    if isinstance(a, tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(x is y or plain_equal(x, y) for x, y in zip(a, b, strict=True))
        )
    plain = (bool, int, float, str, type(None))
    return isinstance(a, plain) and isinstance(b, plain) and bool(a == b)


def restore_contents(live: Any, saved: Any) -> None:
    """Restore a mutable part to its saved copy, in place."""
    if isinstance(live, SlotAttributes):
        for name in live.names:
            if name in saved:
                object.__setattr__(live.owner, name, saved[name])
            elif hasattr(live.owner, name):
                object.__delattr__(live.owner, name)
    elif isinstance(live, types.CellType):
        if saved is not MISSING:
            live.cell_contents = saved
    elif isinstance(live, (np.ndarray, bytearray)):
        live[:] = saved
    elif isinstance(live, random.Random):
        live.setstate(saved)
    elif isinstance(live, np.random.Generator):
        live.bit_generator.state = saved
    elif isinstance(live, (np.random.RandomState, torch.Generator)):
        live.set_state(saved)
    else:
        _refill(live, saved)


def _refill(live: Any, saved: Any) -> None:
    live.clear()
    if isinstance(live, (dict, set)):
        live.update(saved)
    else:
        live.extend(saved)


class ContentsSnapshot:
    """The contents of some values, to be restored after trial runs that receive the values themselves."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._copies = [(one, copy_contents(one)) for value in values for one in iter_mutable(value)]

    def restore(self) -> str:
        """Restore all values; return the types of those that had changed."""
        found = [(live, saved) for live, saved in self._copies if not is_unchanged(live, saved)]
        for live, saved in found:
            restore_contents(live, saved)
        return ", ".join(sorted({type(live).__name__ for live, _ in found}))
