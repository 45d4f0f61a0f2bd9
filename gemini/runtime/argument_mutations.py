"""Argument mutations: mutable objects among the arguments of a remote module, and how the module has changed them.

A worker runs a module on copies of its arguments. A key-value cache that a layer appends to, a list that collects
results, a dictionary of counters: changes of the copy are found, sent back with the result, and applied to the
script's own object.

    worker          objects 0, 1, 2, … of its copies     ──►   {1: the attributes that have changed}
    controller      objects 0, 1, 2, … of the script     ◄──   the same is set

Both sides number the objects in the order of one traversal; the names of their classes are compared. Objects with
custom pickling need not be equivalent on both sides: those must not change.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from gemini.guards.module_state import is_source, source_state
from gemini.ir.encode import LITERALS, attributes
from gemini.runtime.transport.serialization import ClassTable, Packed, pack

_LISTS, _DICTS, _SETS = (list,), (dict, OrderedDict, defaultdict), (set,)
_FIXED = (*LITERALS, torch.Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum,
          frozenset, slice)  # fmt: skip
_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_KEYS = (*LITERALS, type, enum.Enum)


class Contents(NamedTuple):
    """What an object holds: items of a list or set, pairs of a dictionary, attributes of anything else."""

    parts: dict[Any, Any]
    is_whole: bool = True  # else only the changes


class ArgumentObjects:
    """The mutable objects of some arguments, as they were."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], classes: ClassTable) -> None:
        self.classes = classes
        self.objects = find_objects(args, kwargs)
        self._before = [self._fingerprint(value) for value in self.objects]

    def _fingerprint(self, value: Any) -> Any:
        """Return what shows whether an object has changed: its contents, a generator's state, or all of it as bytes."""
        if is_transparent(value):
            return contents_of(value)
        return (source_state(value), []) if is_source(value) else pack(value, self.classes)

    @property
    def numbers(self) -> dict[int, int]:
        """The numbers of the objects, by identity."""
        return {id(value): at for at, value in enumerate(self.objects)}

    def changes(self) -> dict[int, Contents] | str:
        """Return how the objects have changed, by number; in words if the changes cannot be sent."""
        found: dict[int, Contents] = {}
        for at, (value, before) in enumerate(zip(self.objects, self._before, strict=True)):
            if not isinstance(before, dict):
                if not _is_same_closed(before, self._fingerprint(value)):
                    return f"it changes a {type(value).__name__} among its arguments"
                continue
            change = _change(value, before)
            if change is None:
                continue
            if not is_transparent(value):
                return f"it adds objects as keys to a {type(value).__name__} among its arguments"
            found[at] = change
        return found

    def pack_result(self, result: Any, changes: dict[int, Contents]) -> Packed:
        """Pack a result with the changes; argument objects in it are sent as their numbers."""
        if not self.objects:
            return pack(result, self.classes)
        return pack((class_names(self.objects), changes, result), self.classes, self.numbers)


def find_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the mutable objects among arguments, in the order of traversal."""
    found: list[Any] = []
    seen: set[int] = set()
    for value in (*args, *kwargs.values()):
        _collect(value, found, seen)
    return found


def _collect(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, _FIXED):
        return
    if isinstance(value, tuple):
        for part in value:
            _collect(part, found, seen)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    found.append(value)
    if is_transparent(value) and not isinstance(value, _SETS):
        for part in contents_of(value).values():
            _collect(part, found, seen)


def class_names(objects: list[Any]) -> str:
    """Return the class names of objects, in order."""
    return " ".join(type(value).__qualname__ for value in objects)


def apply_result(packed: Any, objects: list[Any]) -> tuple[Any, bool]:
    """Return the result and whether objects were changed; apply the changes to the script's objects."""
    found, changes, result = packed
    if found != class_names(objects):
        raise TypeError(f"its arguments have other objects than their copies: {class_names(objects):.80}, {found:.80}")
    for at, (parts, is_whole) in changes.items():
        _set(objects[at], parts, is_whole)
    return result, bool(changes)


def is_transparent(value: Any) -> bool:
    """Return whether an object consists of its items or attributes, which arrive the same and in the same order."""
    cls = type(value)
    if cls in _LISTS:
        return True
    if cls in _DICTS or cls in _SETS:
        return _are_plain(value)
    if isinstance(value, (list, dict, set, torch.nn.Module)) or callable(value):
        return False
    made_by_python = cls.__module__ != "builtins" and bool(cls.__flags__ & (1 << 9))
    return made_by_python and all(getattr(cls, name, None) is getattr(object, name, None) for name in _PICKLING)


def _are_plain(keys: Iterable[Any]) -> bool:
    """Return whether keys are equal on both sides: no objects with an identity."""
    return all(isinstance(key, _KEYS) or (type(key) is tuple and _are_plain(key)) for key in keys)


def contents_of(value: Any) -> dict[Any, Any]:
    """Return what a transparent object holds, one level deep, by place."""
    if isinstance(value, _DICTS):
        return dict(value)
    if isinstance(value, _LISTS):
        return dict(enumerate(value))
    if isinstance(value, _SETS):
        return dict.fromkeys(value)
    return attributes(value)


def _change(value: Any, before: dict[Any, Any]) -> Contents | None:
    now = contents_of(value)
    different = {key: part for key, part in now.items() if key not in before or not _is_same(part, before[key])}
    if list(now) == list(before) and not isinstance(value, _SETS):
        return Contents(different, is_whole=False) if different else None
    if isinstance(value, _SETS) and now.keys() == before.keys():
        return None
    return Contents(now)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (int, str, bytes, torch.dtype, torch.device)) and one == other


def _is_same_closed(one: Any, other: Any) -> bool:
    (body, tensors), (body2, tensors2) = one, other
    return bool(body == body2 and len(tensors) == len(tensors2) and all(map(_is, tensors, tensors2)))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _set(value: Any, parts: dict[Any, Any], is_whole: bool) -> None:
    if isinstance(value, _SETS):
        value.clear()
        value.update(parts)
    elif isinstance(value, _DICTS):
        if is_whole:
            value.clear()
        value.update(parts)
    elif isinstance(value, _LISTS):
        if is_whole:
            value[:] = parts.values()
        for key, part in () if is_whole else parts.items():
            value[key] = part
    else:
        _set_attributes(value, parts, is_whole)


def _set_attributes(value: Any, parts: dict[str, Any], is_whole: bool) -> None:
    """Set attributes directly, bypassing properties and `__setattr__` of the class."""
    for name in _removed_attributes(value, parts) if is_whole else ():
        object.__delattr__(value, name)
    own = getattr(value, "__dict__", None)
    for name, part in parts.items():
        if own is not None and (name in own or name not in _slots(type(value))):
            own[name] = part
        else:
            object.__setattr__(value, name, part)


def _removed_attributes(value: Any, parts: dict[str, Any]) -> list[str]:
    return [name for name in attributes(value) if name not in parts]


def _slots(cls: type) -> set[str]:
    return set(_slot_names(cls))


def _slot_names(cls: type) -> Iterator[str]:
    for one in cls.__mro__:
        found = one.__dict__.get("__slots__", ())
        yield from (found,) if isinstance(found, str) else found
