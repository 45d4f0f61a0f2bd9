"""Value watch: values that code reads, as they were when first inspected, and whether they still are.

A value has a location, a key in a table: globals of a module, attributes of an object or a class, variables around a
function. There may be many and they are compared in every step, so they lie in rows, and loops in C detect that
nothing has changed; only if something has, each is checked by itself.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from operator import attrgetter, contains, eq, getitem, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gemini.purity.allowances import CONTAINERS, PLAIN
from gemini.snapshot.attribute_values import SlotAttributes, slots_of

MISSING: Any = object()
GONE: Any = object()
_LARGEST = (types.FunctionType, type, torch.Tensor, nn.Module)  # may hold models, or be large
_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_GET = weakref.ref.__call__
_LARGE = 1000  # entries of a container that are compared every time
_INNER = 200  # of containers inside it
_BYTES = 1 << 20  # of a tensor or array
_changes = [0]  # how often a value has changed


def table_itself(table: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the table."""
    return table


def cells(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables around a function that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    return found


_results: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def memoized_results(function: Any) -> dict[Any, Any]:
    """Return the results that a `functools.lru_cache` holds and that may change, by the arguments; one table for all.

    A cache does not show its results; they are those of calls with the same arguments, which do not run the function.
    """
    known = _results.setdefault(function, {})
    tables = [part for part in gc.get_referents(function) if type(part) is dict and part is not function.__dict__]
    keys = [key for table in tables for key in table] if function.cache_info().currsize else []
    for key in keys if not function.cache_parameters()["typed"] else ():
        args = key if isinstance(key, tuple) else (key,)
        if any(type(part) is object for part in args):  # the mark before keywords
            pairs = args[[type(part) for part in args].index(object) + 1 :]
            args, kwargs = args[: -len(pairs) - 1], dict(zip(pairs[::2], pairs[1::2], strict=False))
        else:
            kwargs = {}
        result = function(*args, **kwargs) if all(isinstance(part, PLAIN) for part in (*args, *kwargs)) else None
        if not isinstance(result, PLAIN):
            known[key] = result
    return known


def members(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, if it has any."""
    try:
        found: Mapping[str, Any] = vars(owner)
    except Exception:  # its class may raise anything
        return {}
    return found


def slots(owner: Any) -> dict[str, Any]:
    """Return the slots of an object that are set."""
    return {} if isinstance(owner, type) else SlotAttributes(owner, slots_of(type(owner))).values()


class ValueLocation(NamedTuple):
    """Where a value is read: a key in the table that `read` returns for an owner."""

    owner: Any
    key: Any
    read: Callable[[Any], Mapping[Any, Any]] = table_itself


class WatchedValue:
    """One value. It keeps neither large values nor classes and functions alive, nor what these hold."""

    def __init__(self, name: str, place: ValueLocation) -> None:
        self.name, self.key, self.read = name, place.key, place.read
        found = weak_reference(place.owner)
        self.is_weak, self.owner = found is not None, place.owner if found is None else found
        self.is_changed = False  # permanently: workers may have either value
        value = self.now()
        found = weak_reference(value)
        self._is_weak, self._value = found is not None, value if found is None else found
        self.copied, self.inside = _fingerprint(value), _inside(value)

    def place_owner(self) -> Any:
        """Return the owner; None if it is gone."""
        return self.owner() if self.is_weak else self.owner

    def now(self) -> Any:
        """Return the current value; GONE if its owner is, and with it all code that could read it."""
        owner = self.place_owner()
        return GONE if owner is None else self.read(owner).get(self.key, MISSING)

    def stable_table(self, stable: Container[int]) -> Mapping[Any, Any] | None:
        """Return its table if that can be retained: globals, classes of modules, objects (by id)."""
        owner: Any = self.owner() if self.is_weak else self.owner
        if self.read is table_itself:
            return self.read(owner)
        return vars(owner) if self.read is vars and (_is_of_module(owner) or id(owner) in stable) else None

    @property
    def value(self) -> Any:
        """The recorded value; GONE if it has been freed."""
        found = self._value() if self._is_weak else self._value
        return GONE if found is None and self._is_weak else found

    def has_changed(self) -> bool:
        """Return whether the script has put another value there, or changed this one."""
        if not self.is_changed:
            now, before = self.now(), self.value
            if now is GONE:
                return False
            if now is before:
                is_same = self.copied is None or _equal(_fingerprint(now), self.copied)
                self.is_changed = not is_same or not _equal(_inside(now), self.inside)
            else:
                is_plain = isinstance(now, (*PLAIN, *CONTAINERS)) and type(now) is type(before)
                self.is_changed = not is_plain or not _equal(now, before)
            _changes[0] += self.is_changed
        return self.is_changed


_known: dict[int, tuple[Any, dict[Any, WatchedValue]]] = {}  # watched values of this process, by owner


def _forget(known: dict[int, Any], number: int, _: Any) -> None:
    known.pop(number, None)  # at the end of the process globals are gone


def watch(name: str, place: ValueLocation) -> WatchedValue:
    """Return the watched value at a place: one for all models, since workers share the code that reads it."""
    number = id(place.owner)
    if number not in _known:
        _known[number] = weak_reference(place.owner, partial(_forget, _known, number)) or place.owner, {}
    known = _known[number][1]
    if place[1:] not in known:
        known[place[1:]] = WatchedValue(name, place)
    return known[place[1:]]


class TensorContents:
    """A tensor as it was. Contents are compared: writes through `.data` and NumPy do not count as versions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = -1 if tensor.is_inference() else tensor._version
        with torch.inference_mode(False):
            self._copy = tensor.detach().clone() if tensor.layout is torch.strided and not tensor.is_meta else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorContents):
            return NotImplemented
        return self._version == other._version and _are_equal_tensors(self._copy, other._copy)

    def are_those_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor still has them."""
        if not tensor.is_inference() and tensor._version != self._version:
            return False
        return self._copy is None or _are_equal_tensors(self._copy, tensor.detach())

    __hash__ = None  # type: ignore[assignment]


def _are_equal_tensors(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.dtype == other.dtype and one.device == other.device and torch.equal(one, other))


class ValueSnapshot:
    """Values that have not changed, in their current state.

    Most are functions, classes and objects of modules, and what these hold: they lie in one row, and are retained.
    """

    def __init__(self, entries: Iterable[WatchedValue]) -> None:
        self._changes = _changes[0]
        present: list[tuple[Any, Any, Any]] = []  # tables, keys, values
        absent: list[tuple[Any, Any]] = []
        stable: set[int] = set()
        self._kept: list[Any] = []  # functions
        self._functions: list[Any] = []  # other functions, and tensors, by weak reference
        self._tensors: list[Any] = []
        self._containers: list[Any] = []
        self._others: list[WatchedValue] = []  # that are checked one by one
        rows: dict[tuple[Any, ...], list[tuple[WatchedValue, Any]]] = {}
        for entry in entries:
            value = entry.now()
            if value is GONE:
                continue
            self._sort(entry, value)
            table = entry.stable_table(stable)
            if table is not None and value is MISSING:
                absent.append((table, entry.key))
            elif table is not None and (_is_of_module(value) or not isinstance(value, _LARGEST)):
                present.append((table, entry.key, value))
                stable.add(id(value))
            else:
                kind = entry.read, entry.is_weak, value is MISSING, weak_reference(value) is None
                rows.setdefault(kind, []).append((entry, value))
        self._tables, self._keys, self._values = ([one[at] for one in present] for at in range(3))
        self._without, self._missing = ([one[at] for one in absent] for at in range(2))
        self._rows = [*map(_Row, rows.values())]
        self._kept_codes, self._codes = [*map(_CODE, self._kept)], [*map(_CODE, map(_GET, self._functions))]
        self._contents = [*map(TensorContents, map(_GET, self._tensors))]
        self._copies = [*map(_fingerprint, self._containers)]

    def _sort(self, entry: WatchedValue, value: Any) -> None:
        """Put a value into the list by which its contents are compared."""
        if isinstance(value, types.FunctionType):
            self._kept.append(value) if _is_of_module(value) else self._functions.append(weakref.ref(value))
        elif isinstance(value, torch.Tensor):
            self._tensors.append(weakref.ref(value))
        elif _inside(value) is not None or isinstance(value, nn.Module):
            self._others.append(entry)
        elif _fingerprint(value) is not None:
            self._containers.append(value)

    def holds(self) -> bool:
        """Return whether all are unchanged."""
        try:
            return (
                self._changes == _changes[0]
                and all(map(is_, map(getitem, self._tables, self._keys), self._values))
                and not any(map(contains, self._without, self._missing))
                and [*map(_CODE, self._kept)] == self._kept_codes
                and (not self._rows or all(map(_Row.holds, self._rows)))
                and (not self._functions or [*map(_CODE, map(_GET, self._functions))] == self._codes)
                and all(map(TensorContents.are_those_of, self._contents, map(_GET, self._tensors)))
                and (not self._containers or all(map(eq, self._containers, self._copies)))
                and (not self._others or not any(map(WatchedValue.has_changed, self._others)))
            )
        except Exception:  # something is gone, or cannot be compared
            return False


class _Row:
    """Values of one kind: read in the same way, with owners and values either all retained or all weak."""

    def __init__(self, found: list[tuple[WatchedValue, Any]]) -> None:
        self._owners, self._keys = [entry.owner for entry, _ in found], [entry.key for entry, _ in found]
        first, value = found[0]
        self._read, self._is_weak = first.read, first.is_weak
        self._is_missing, self._are_weak = value is MISSING, weak_reference(value) is not None
        values = [one for _, one in found]
        self._values = [*map(weakref.ref, values)] if self._are_weak else values

    def holds(self) -> bool:
        owners: Iterable[Any] = map(_GET, self._owners) if self._is_weak else self._owners
        tables = owners if self._read is table_itself else map(self._read, owners)
        if self._is_missing:
            return not any(map(contains, tables, self._keys))
        values: Iterable[Any] = map(_GET, self._values) if self._are_weak else self._values
        return all(map(is_, map(getitem, tables, self._keys), values))


def weak_reference(value: Any, end: Callable[[Any], object] | None = None) -> weakref.ref[Any] | None:
    """Return a weak reference to a value that may be large or hold models; None for values to be retained."""
    if isinstance(value, (*PLAIN, *CONTAINERS)):
        return None
    try:
        return weakref.ref(value, end)
    except TypeError:
        return None


def _is_of_module(value: Any) -> bool:
    """Return whether a function or class belongs to a module, and so holds nothing of a call that created it."""
    if not isinstance(value, (type, types.FunctionType)) or "<locals>" in value.__qualname__:
        return False
    return isinstance(value, type) or value.__code__.co_freevars in ((), ("__class__",))


def _inside(value: Any) -> Any:
    """Return the contents of an array, or of containers and arrays in a container; None if there are none."""
    if isinstance(value, (np.ndarray, deque)):
        return _contents(value, [_LARGE])
    if not isinstance(value, (list, tuple, dict)) or len(value) >= _LARGE:
        return None
    room = [_INNER]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    holders = (list, tuple, dict, set, deque, np.ndarray, torch.Tensor)
    return {key: _contents(part, room) for key, part in parts if isinstance(part, holders)} or None


def _contents(value: Any, room: list[int]) -> Any:
    """Return what can be compared later without retaining anything: a tensor's version, other objects' identity."""
    room[0] -= 1
    if room[0] < 0:
        return None
    if isinstance(value, torch.Tensor):
        return id(value), _fingerprint(value)
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes()) if value.nbytes <= _BYTES else id(value)
    if isinstance(value, dict):
        return {key: _contents(part, room) for key, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_contents(part, room) for part in value]
    if isinstance(value, set):
        return value.copy()
    return value if isinstance(value, PLAIN) else id(value)


def find_incomparable(value: Any) -> str:
    """Return why changes of a value would not be noticed: it is too large to be compared every time; '' otherwise."""
    if isinstance(value, nn.Module):
        held = sum(one.nbytes for one in (*value.parameters(), *value.buffers()))
    else:
        held = value.nbytes if isinstance(value, (torch.Tensor, np.ndarray)) else 0
    if held > _BYTES:
        return f"{held / 1e6:.1f} MB that are not part of the model"
    room = [_LARGE + _INNER]
    return "" if _fits(value, room) else f"more than {_LARGE} items"


def _fits(value: Any, room: list[int]) -> bool:
    """Return whether a container, with those inside it, has few enough items."""
    if not isinstance(value, CONTAINERS):
        return True
    room[0] -= len(value)
    items = value.values() if isinstance(value, Mapping) else value
    return room[0] >= 0 and all(_fits(item, room) for item in items)


def _fingerprint(value: Any) -> Any:
    """Return what shows that a value has been changed in place; None if nothing does."""
    if isinstance(value, torch.Tensor):
        return TensorContents(value)
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [one.training for one in value.modules()], [(id(one), TensorContents(one)) for one in tensors]
    if isinstance(value, types.FunctionType):  # changed by tools that reload code
        return value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, (list, dict, set)) and len(value) < _LARGE:
        return value.copy()
    return None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared
        return False
