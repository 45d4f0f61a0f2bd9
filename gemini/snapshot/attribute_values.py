"""What an attribute holds: everything in it that a forward can change, copied, compared and put back in place.

Containers and objects at any depth, also in tuples; cells of the program's functions; arrays of NumPy; generators of
random numbers. Copies are of one level each: what a container holds is copied on its own.
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
_FIXED = (tuple, frozenset)  # hold what may change, and do not change
_LIBRARIES = (  # and this one
    *{sysconfig.get_path(one) + os.sep for one in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
_NAMESPACES = frozenset({"__main__", "types", "argparse", "collections"})
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MANY = 10_000  # items, or containers: more are data, and are not looked into
_LARGE = 1 << 20  # bytes of an array
MISSING: Any = object()


class SlotAttributes:
    """The attributes of an object that keeps them in slots."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner, self.names = owner, names

    def values(self) -> dict[str, Any]:
        """Those that are set."""
        return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}


def iter_mutable(value: Any) -> Iterator[Any]:
    """Whatever a value holds, at any depth, that can change."""
    return (live for _, found in _walk(value) for live in found)


def callable_state(value: Any) -> list[Any]:
    """What something callable of the program works with: variables around it, the object of a method, attributes."""
    return [one for one in (*map(copy_contents, _changeable(value)), *_parts(value)) if one is not None and one != {}]


def generators(value: Any) -> list[torch.Generator]:
    """The generators of torch that a value is, or holds."""
    return [one for one, _ in _walk(value) if isinstance(one, torch.Generator)]


def holds_iterator(value: Any) -> bool:
    """Whether a value is or holds an iterator that cannot be put back: a counter, a generator function at work, a file.

    Objects of the program's own classes can, whatever they are.
    """
    return any(isinstance(one, Iterator) and not _keeps_state(type(one).__module__) for one, _ in _walk(value))


def _walk(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """What a value is and holds, at any depth, each with its parts that can change."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < _MANY:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (str, int, float, torch.Tensor)):
            continue
        seen.add(id(one))
        found = [*_changeable(one)]
        yield one, found
        for live in found:
            waiting += _items(live)
        waiting += _parts(one)


def _parts(value: Any) -> list[Any]:
    """What a value is made of, for good: items of a tuple, the object of a method, arguments that a partial has."""
    if isinstance(value, _FIXED):
        return [*value] if len(value) <= _MANY else []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType) and _is_of_program(value.__module__):
        return [value.__defaults__, value.__kwdefaults__]
    return []


def _changeable(value: Any) -> Iterator[Any]:
    """The parts of a value that can change: itself, its attributes, also of a function, and the variables around it."""
    if isinstance(value, (*_CONTAINERS, *_SOURCES, bytearray)):
        yield value
    elif isinstance(value, np.ndarray):
        if value.nbytes <= _LARGE and value.flags.writeable:
            yield value
    elif isinstance(value, types.MethodType):
        yield from _changeable(value.__func__)
        yield from _changeable(value.__self__)
    elif isinstance(value, types.BuiltinMethodType):
        yield from _changeable(value.__self__)
    elif isinstance(value, types.FunctionType):
        if _is_of_program(value.__module__):
            yield from value.__closure__ or ()
            yield vars(value)
    elif not isinstance(value, (nn.Module, type)) and _keeps_state(type(value).__module__):
        if isinstance(own := getattr(value, "__dict__", None), dict):
            yield own
        if names := slots_of(type(value)):
            yield SlotAttributes(value, names)


def slots_of(kind: type) -> list[str]:
    """The slots that objects of a class have."""
    return [name for one in kind.__mro__ for name in _slots(one)]


def _slots(kind: type) -> list[str]:
    """The slots that a class adds."""
    names = vars(kind).get("__slots__", ())
    own = [names] if isinstance(names, str) else list(names)
    return [name for name in own if isinstance(vars(kind).get(name), types.MemberDescriptorType)]


def _is_of_program(module: str | None) -> bool:
    """Whether code of a module is the program's, and of no library."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return module == "__main__" or (bool(file) and not file.startswith(_LIBRARIES))


def _keeps_state(module: str) -> bool:
    """Whether objects of a module's classes may keep state of a forward, and nobody else's meanwhile.

    Those of libraries may be used by other threads: to put them back would undo what these have done.
    """
    return module in _NAMESPACES or _is_of_program(module)


def _items(live: Any) -> list[Any]:
    if isinstance(live, SlotAttributes):
        return [*live.values().values()]
    if isinstance(live, types.CellType):
        return [copy_contents(live)]
    if not isinstance(live, _CONTAINERS) or len(live) > _MANY:
        return []
    return [*live.values()] if isinstance(live, dict) else [*live]


def copy_contents(live: Any) -> Any:
    """What it holds now: the items as they are, for a class of its own may copy itself into something else."""
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
    """The tensors in what something held, whose writes are counted."""
    items = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, deque)) else [saved]
    for one in items:
        if isinstance(one, torch.Tensor) and not one.is_inference():
            yield one


def is_unchanged(live: Any, saved: Any) -> bool:
    """Whether it holds what was saved of it."""
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
    return _same_items(live.values() if isinstance(live, SlotAttributes) else live, saved)


def _same_items(a: Any, b: Any) -> bool:
    if not isinstance(a, type(b)) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        if all(map(is_, a, b)) and all(map(is_, a.values(), b.values())):  # as a rule; a loop in C
            return True
        return all(key in b and (b[key] is value or plain_equal(b[key], value)) for key, value in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(map(is_, a, b)) or all(x is y or plain_equal(x, y) for x, y in zip(a, b, strict=True))


def plain_equal(a: Any, b: Any) -> bool:
    """Whether two plain values, or tuples of such, are equal."""
    if isinstance(a, tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(x is y or plain_equal(x, y) for x, y in zip(a, b, strict=True))
        )
    plain = (bool, int, float, str, type(None))
    return isinstance(a, plain) and isinstance(b, plain) and bool(a == b)


def restore_contents(live: Any, saved: Any) -> None:
    """Have it hold what was saved of it."""
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
    """What some values hold, to be put back after trial runs that are given the values themselves."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._held = [(one, copy_contents(one)) for value in values for one in iter_mutable(value)]

    def put_back(self) -> str:
        """Have all of it as it was; what was not is named."""
        found = [(live, saved) for live, saved in self._held if not is_unchanged(live, saved)]
        for live, saved in found:
            restore_contents(live, saved)
        return ", ".join(sorted({type(live).__name__ for live, _ in found}))
