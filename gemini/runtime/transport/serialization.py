"""Serialization: a Python value as bytes, with its tensors taken out.

Tensors are what autograd must see, so they travel beside the rest: `unpack(pack(value))` is the value with any tensors
in the place of its own. A tensor that occurs twice is sent once.

A worker never runs the script and cannot import the classes and functions that it defines. They travel by value once,
under a number that both sides use from then on, so an output of such a class comes back as the script's own class. A
function that holds parts of a module (`m = self.mlp; self.run = lambda x: m(x)`) is packed with its owner: alone it
would get copies whose weights and modes nothing keeps up to date.

Interned strings stay interned: `kind is "conv"` holds in a worker where it holds in the script.
"""

from __future__ import annotations

import copyreg
import functools
import io
import os
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from gemini.user_code import is_user_module

try:
    import cloudpickle
except ImportError:  # then code that workers cannot import cannot be sent
    cloudpickle = None

if cloudpickle is not None:  # it tells classes apart by `uuid.uuid4`, which a script may replace by one that repeats
    cloudpickle.cloudpickle.uuid = types.SimpleNamespace(uuid4=lambda: uuid.UUID(bytes=os.urandom(16), version=4))

from gemini.runtime.transport.module_pickling import reduce_memoized, reduce_recording, reduce_value

Packed = tuple[bytes, list[torch.Tensor]]
_NAMED = (type, types.FunctionType)
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_NOTHING: Mapping[int, int] = {}
_REGISTRY = threading.RLock()  # of cloudpickle, which the script may use too
_copies: weakref.WeakSet[type] = weakref.WeakSet()  # classes of other processes, rebuilt in this one
# The most frequent values need no pickle: one tensor; arguments of a call that are all tensors.
_TENSOR, ONLY_TENSORS = b"t", b"a"


class MissingClass(NamedTuple):
    """Stands for a class that the other side has announced but that cannot be created in this process."""

    reason: str


class ClassTable:
    """Classes and functions that cross by number. One side uses even numbers, the other odd ones.

    A class that cannot be copied gets no number: packing a value that contains it fails; other values are unaffected.
    """

    def __init__(self, side: int = 0, *, stays: bool = False) -> None:
        """`stays`: packed values are read in this process again."""
        self.number: dict[Any, int] = {}
        self.of: dict[int, Any] = {}
        self._next, self._stays = side, stays
        self._unannounced: dict[int, bytes] = {}  # code by number
        self._lock = threading.Lock()

    def learn(self, number: int, one: Any) -> None:
        """Record the number of a class, which both sides use."""
        self.number[one], self.of[number] = number, one

    def name(self, one: Any) -> tuple[int] | None:
        """Return the number under which a class or function of the script is sent; None for what can be imported."""
        if one in self.number:
            return (self.number[one],)
        if not is_user_module(one.__module__) or (cloudpickle is None and one.__module__ != "__main__"):
            return None
        if isinstance(one, types.FunctionType) and _holds_parts(one, set()):
            return None
        copy = b"" if self._stays else _copy_code(one)
        with self._lock:
            if one not in self.number:
                self.learn(self._next, one)
                if not self._stays:
                    self._unannounced[self._next] = copy
                self._next += 2
            return (self.number[one],)

    @property
    def has_updates(self) -> bool:
        """Whether classes have to be announced."""
        return bool(self._unannounced)

    def unannounced(self) -> list[tuple[int, bytes]]:
        """Return the classes that the other side needs before it can read the values packed so far."""
        return list(self._unannounced.items())

    def mark_announced(self, classes: list[tuple[int, bytes]]) -> None:
        """Note that the other side has received these classes."""
        for number, _ in classes:
            self._unannounced.pop(number, None)

    def add_announced(self, classes: list[tuple[int, bytes]]) -> None:
        """Create the classes that the other side has announced."""
        for number, body in classes:
            try:
                self.learn(number, _load_code(body))
            except Exception as error:  # reported when the class is used
                self.of[number] = MissingClass(f"{type(error).__name__}: {error}")


def pack(value: Any, classes: ClassTable, known: Mapping[int, int] = _NOTHING) -> Packed:
    """Return the bytes of a value and its tensors; objects in `known`, by identity, are sent as their number."""
    if type(value) is torch.Tensor:
        return _TENSOR, [value]
    if type(value) is tuple and len(value) == 2 and _are_tensors(*value):
        return ONLY_TENSORS, list(value[0])
    try:
        return _pack(_Packer, value, classes, known)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return _pack(_ThoroughPacker, value, classes, known)


def _pack(cls: type, value: Any, classes: ClassTable, known: Mapping[int, int]) -> Packed:
    body = io.BytesIO()
    packer = cls(body, pickle.HIGHEST_PROTOCOL)
    packer.classes, packer.tensors, packer.place, packer.known = classes, [], {}, known
    packer.dump(value)
    return body.getvalue(), packer.tensors


def unpack(body: bytes, tensors: Sequence[torch.Tensor | None], classes: ClassTable, known: Sequence[Any] = ()) -> Any:
    """Return the value, with these tensors in the place of its own and these objects for the known ones."""
    if body == _TENSOR:
        return tensors[0]
    if body == ONLY_TENSORS:
        return tuple(tensors), {}
    unpacker = _Unpacker(io.BytesIO(body))
    unpacker.tensors, unpacker.classes, unpacker.known = tensors, classes, known
    return unpacker.load()


def _are_tensors(args: Any, kwargs: Any) -> bool:
    """Return whether the arguments of a call are positional tensors only, no two the same."""
    if type(args) is not tuple or type(kwargs) is not dict or kwargs:
        return False
    for one in args:
        if type(one) is not torch.Tensor:
            return False
    return len(args) < 2 or len({id(one) for one in args}) == len(args)


def receives_code_with_parts(args: Any, kwargs: Any) -> bool:
    """Return whether arguments include functions that hold tensors or modules (`block(x, lambda x: self.attn(x))`)."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, _CODE))
    return any(_holds_parts(one, set()) for one in given)


def _holds_parts(value: Any, seen: set[int]) -> bool:
    """Return whether a function, or what it was created with, holds tensors or modules."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, types.FunctionType):
        parts = (
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *map(_content, value.__closure__ or ()),
        )
    elif isinstance(value, types.MethodType):
        parts = (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    return any(_holds_parts(part, seen) for part in parts)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _copy_code(one: Any) -> bytes:
    """Return a class or function with its code, without importing user modules in the worker."""
    if cloudpickle is None:
        raise pickle.PicklingError(
            f"{one.__qualname__} of the script can only be sent with cloudpickle, which is not installed\n"
            "    → pip install cloudpickle"
        )
    try:
        with _without_imports():
            return _dump_code(one)
    except Exception:  # a value in its module cannot be copied: the worker imports the module, if it can
        return _dump_code(one)


def _dump_code(one: Any) -> bytes:
    body = io.BytesIO()
    _Copier(body).dump(one)
    return body.getvalue()


def _load_code(body: bytes) -> Any:
    """Rebuild a class or function from its code."""
    return _CopiedUnpickler(io.BytesIO(body)).load()


@contextmanager
def _without_imports() -> Iterator[None]:
    """Copy the code of all user modules: importing one in a worker would run it a second time.

    It would parse options, write files and print again.
    """
    with _REGISTRY:
        known = cloudpickle.list_registry_pickle_by_value()
        registered = [module for name, module in list(sys.modules.items()) if _can_be_dump_code(name, module, known)]
        for module in registered:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)


def _can_be_dump_code(name: str, module: Any, known: Collection[str]) -> bool:
    is_plain = isinstance(module, types.ModuleType) and module.__name__ == name
    return is_plain and name not in known and name != "__main__" and is_user_module(name)


def _reduce_method(method: types.MethodType) -> Any:
    """Reduce a bound method: by name only if its class has it; a script may bind any function to an object."""
    owner, function = method.__self__, method.__func__
    name = getattr(function, "__name__", "")
    given = getattr(owner if isinstance(owner, type) else type(owner), name, None)
    if getattr(given, "__func__", given) is function:
        return getattr, (owner, name)
    return types.MethodType, (function, owner)


_OWN = {types.MethodType: _reduce_method, functools._lru_cache_wrapper: reduce_memoized}
_TABLE = ChainMap[Any, Any](_OWN, copyreg.dispatch_table)


def _interned(value: Any) -> str | None:
    """Return an interned string (a literal that looks like a name), which stands for itself; None for other values."""
    return value if type(value) is str and value.isidentifier() and sys.intern(value) is value else None


class _Packer(pickle.Pickler):
    """For values that Python itself can pickle."""

    dispatch_table: ClassVar[Any] = _TABLE  # type: ignore[misc]
    classes: ClassTable
    tensors: list[torch.Tensor]
    place: dict[int, int]
    known: Mapping[int, int]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            at = self.place.setdefault(id(value), len(self.tensors))
            if at == len(self.tensors):
                self.tensors.append(value)
            return at
        if isinstance(value, _NAMED):
            return self.classes.name(value)
        return str(self.known[id(value)]) if id(value) in self.known else _interned(value)

    def reducer_override(self, value: Any) -> Any:
        return reduce_recording(value) if isinstance(value, torch.nn.Module) else NotImplemented


class _Copier(cloudpickle.Pickler if cloudpickle else pickle.Pickler):  # type: ignore[misc]
    """For code that travels by value, with everything that it uses."""

    def persistent_id(self, value: Any) -> Any:
        return _interned(value)

    def reducer_override(self, value: Any) -> Any:
        found = reduce_value(value)
        return super().reducer_override(value) if found is NotImplemented else found


class _ThoroughPacker(_Copier):
    """For values that Python cannot pickle: functions created inside others, modules, …"""

    persistent_id = _Packer.persistent_id


class _Opener(pickle.Unpickler):
    """Resolves a class of this process that comes back from another to the class itself, unchanged.

    What comes with it are copies of its methods, with other globals.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.startswith("cloudpickle") and name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return functools.partial(_skeleton, found)
        if module.startswith("cloudpickle") and name == "_class_setstate":
            return functools.partial(_fill, found)
        return found


class _CopiedUnpickler(_Opener):
    """Reads what a `_Copier` wrote."""

    def persistent_load(self, found: str) -> str:
        return sys.intern(found)


def _skeleton(make: Callable[..., type], *given: Any) -> type:
    """Return an empty class, or the existing class that it is a copy of."""
    known = {*cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS}
    made = make(*given)
    if made not in known:
        _copies.add(made)
    return made


def _fill(fill: Callable[[type, Any], type], cls: type, state: Any) -> type:
    return fill(cls, state) if cls in _copies else cls


class _Unpacker(_Opener):
    tensors: Sequence[torch.Tensor | None]
    classes: ClassTable
    known: Sequence[Any]

    def persistent_load(self, found: Any) -> Any:
        if isinstance(found, int):
            return self.tensors[found]
        if isinstance(found, str):
            return sys.intern(found) if found.isidentifier() else self.known[int(found)]
        one = self.classes.of[found[0]]
        if isinstance(one, MissingClass):
            raise pickle.UnpicklingError(one.reason)
        return one
