"""Packing: a Python value as bytes, with its tensors taken out.

The tensors are what autograd must see, so they travel beside the rest: `unpack(pack(value))` is the value with whatever
tensors one puts in the place of its own. The same tensor in two places is one.

Classes and functions that the user's program defines are not importable in a worker, where the program never runs. They
travel by value once, under a number that both sides use from then on; so an output of such a class comes home as the
very class that the program knows. A function that holds parts of a module (`m = self.mlp; self.run = lambda x: m(x)`)
is packed with what holds it: by itself it would have copies, whose weights and modes nobody keeps up to date.

Names that Python keeps once stay so: `kind is "conv"` holds in a worker where it holds in the program.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import threading
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from gemini.user_code import is_user_module

try:
    import cloudpickle
except ImportError:  # then what workers cannot import cannot be sent
    cloudpickle = None

from gemini.runtime.transport.module_pickling import reduce_memoized, reduce_recording, reduce_value

Packed = tuple[bytes, list[torch.Tensor]]
_NAMED = (type, types.FunctionType)
_CODE = (types.FunctionType, types.MethodType, functools.partial)
_NOTHING: Mapping[int, int] = {}
_REGISTRY = threading.RLock()  # of cloudpickle, which is the program's, too
_copies: weakref.WeakSet[type] = weakref.WeakSet()  # classes of other processes, made again here
# What is most often sent needs no pickle: one tensor; the arguments of a call that are nothing but tensors.
_TENSOR, ONLY_TENSORS = b"t", b"a"


class MissingClass(NamedTuple):
    """In the place of a class that the other side has told but that cannot be made here."""

    reason: str


class ClassTable:
    """The classes and functions that cross by number. Each side counts its own: one even, the other odd numbers.

    One that cannot be copied gets no number: packing what it is in fails, and nothing else that is sent does.
    """

    def __init__(self, side: int = 0, *, stays: bool = False) -> None:
        """`stays`: what is packed with them is read here again."""
        self.number: dict[Any, int] = {}
        self.of: dict[int, Any] = {}
        self._next, self._stays = side, stays
        self._untold: dict[int, bytes] = {}  # copies of those that the other side does not know yet
        self._lock = threading.Lock()

    def learn(self, number: int, one: Any) -> None:
        """Both sides know `one` as `number`."""
        self.number[one], self.of[number] = number, one

    def name(self, one: Any) -> tuple[int] | None:
        """How a class or function of the user's program is named on the way; None for what can be imported."""
        if one in self.number:
            return (self.number[one],)
        if not is_user_module(one.__module__) or (cloudpickle is None and one.__module__ != "__main__"):
            return None
        if isinstance(one, types.FunctionType) and _holds_parts(one, set()):
            return None
        copy = b"" if self._stays else _by_value(one)
        with self._lock:
            if one not in self.number:
                self.learn(self._next, one)
                if not self._stays:
                    self._untold[self._next] = copy
                self._next += 2
            return (self.number[one],)

    @property
    def has_updates(self) -> bool:
        """Whether there is anything that the other side must be told."""
        return bool(self._untold)

    def news(self) -> list[tuple[int, bytes]]:
        """What the other side must be told before it can read what was packed so far."""
        return list(self._untold.items())

    def told(self, news: list[tuple[int, bytes]]) -> None:
        """The other side knows these now."""
        for number, _ in news:
            self._untold.pop(number, None)

    def take(self, news: list[tuple[int, bytes]]) -> None:
        """Learn what the other side has told."""
        for number, body in news:
            try:
                self.learn(number, _from_value(body))
            except Exception as error:  # say so when it is used, not here
                self.of[number] = MissingClass(f"{type(error).__name__}: {error}")


def pack(value: Any, classes: ClassTable, known: Mapping[int, int] = _NOTHING) -> Packed:
    """The bytes of a value and the tensors in it; objects that the other side knows, by identity, as their number."""
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
    """The value, with these tensors in the place of its own, and these objects for those that are known."""
    if body == _TENSOR:
        return tensors[0]
    if body == ONLY_TENSORS:
        return tuple(tensors), {}
    unpacker = _Unpacker(io.BytesIO(body))
    unpacker.tensors, unpacker.classes, unpacker.known = tensors, classes, known
    return unpacker.load()


def _are_tensors(args: Any, kwargs: Any) -> bool:
    """Whether a call has only tensors for arguments, by position, no two the same."""
    if type(args) is not tuple or type(kwargs) is not dict or kwargs:
        return False
    for one in args:
        if type(one) is not torch.Tensor:
            return False
    return len(args) < 2 or len({id(one) for one in args}) == len(args)


def is_given_code_with_parts(args: Any, kwargs: Any) -> bool:
    """Whether a call is given functions that hold tensors or modules (`sublayer(x, lambda x: self.attention(x))`)."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, _CODE))
    return any(_holds_parts(one, set()) for one in given)


def _holds_parts(value: Any, seen: set[int]) -> bool:
    """Whether a function, or what it was made with, holds tensors or modules."""
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
    except ValueError:  # not filled yet
        return None


def _by_value(one: Any) -> bytes:
    """A class or function with its code."""
    if cloudpickle is None:
        raise pickle.PicklingError(
            f"{one.__qualname__} of the main program can only be sent with cloudpickle, which is not installed\n"
            "    → pip install cloudpickle"
        )
    try:
        with _without_imports():
            return _copied(one)
    except Exception:  # what its module holds cannot be copied: the worker imports the module, if it can
        return _copied(one)


def _copied(one: Any) -> bytes:
    body = io.BytesIO()
    _Copier(body).dump(one)
    return body.getvalue()


def _from_value(body: bytes) -> Any:
    """A class or function that came with its code."""
    return _CopiedUnpickler(io.BytesIO(body)).load()


@contextmanager
def _without_imports() -> Iterator[None]:
    """Code of all modules of the user's is copied: to import one in a worker would be to run what it does once more.

    Options would be parsed there, files written, and what it prints would be printed again.
    """
    with _REGISTRY:
        known = cloudpickle.list_registry_pickle_by_value()
        ours = [module for name, module in list(sys.modules.items()) if _can_be_copied(name, module, known)]
        for module in ours:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in ours:
                cloudpickle.unregister_pickle_by_value(module)


def _can_be_copied(name: str, module: Any, known: Collection[str]) -> bool:
    is_plain = isinstance(module, types.ModuleType) and module.__name__ == name
    return is_plain and name not in known and name != "__main__" and is_user_module(name)


def _reduce_method(method: types.MethodType) -> Any:
    """A bound method: by its name only where its class has it; a program may bind any function to one object."""
    owner, function = method.__self__, method.__func__
    name = getattr(function, "__name__", "")
    given = getattr(owner if isinstance(owner, type) else type(owner), name, None)
    if getattr(given, "__func__", given) is function:
        return getattr, (owner, name)
    return types.MethodType, (function, owner)


_OWN = {types.MethodType: _reduce_method, functools._lru_cache_wrapper: reduce_memoized}
_TABLE = ChainMap[Any, Any](_OWN, copyreg.dispatch_table)


def _kept_once(value: Any) -> str | None:
    """A string that Python keeps once (a literal, if it looks like a name), which stands for itself; else None."""
    return value if type(value) is str and value.isidentifier() and sys.intern(value) is value else None


class _Packer(pickle.Pickler):
    """For what Python itself can pickle."""

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
        return str(self.known[id(value)]) if id(value) in self.known else _kept_once(value)

    def reducer_override(self, value: Any) -> Any:
        return reduce_recording(value) if isinstance(value, torch.nn.Module) else NotImplemented


class _Copier(cloudpickle.Pickler if cloudpickle else pickle.Pickler):  # type: ignore[misc]
    """For code that travels by value, with all that it uses."""

    def persistent_id(self, value: Any) -> Any:
        return _kept_once(value)

    def reducer_override(self, value: Any) -> Any:
        found = reduce_value(value)
        return super().reducer_override(value) if found is NotImplemented else found


class _ThoroughPacker(_Copier):
    """For what it cannot: functions made inside others, modules, …"""

    persistent_id = _Packer.persistent_id


class _Opener(pickle.Unpickler):
    """A class of this process that comes back from another is the very class, and stays as it is.

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
    """A class, empty, or the one that it is a copy of."""
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
