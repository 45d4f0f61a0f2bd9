"""Monkeypatches: functions and methods of libraries that the script has replaced.

Workers import torch and libraries as installed, and would call the originals. A model whose code reaches a replaced
one therefore runs in the controller: an op of torch, a method or another attribute of one of its modules' classes
(`LlamaAttention.is_causal`), a function that its code reaches by names (`modeling_gpt2.eager_attention_forward`), or
one in a table that it reaches (`AttentionInterface.register("mine", mine)`). A worker reports the attributes of
classes in a process that never ran the script.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gemini.guards.base import ChangeGuard
from gemini.guards.reachable_code import find_reachable, tables_of
from gemini.purity.bytecode import attributes_stored_in, functions_of
from gemini.user_code import is_user_module

_OWN = ("torch", "typing_extensions")  # libraries whose functions stand for torch's
_COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)
_OPS = frozenset(
    (*dir(torch._C._VariableFunctions), *torch.functional.__all__)
)  # the names of torch itself that are ops
_IDLE = frozenset(("__repr__", "__str__", "__format__", "cuda", "backward"))  # of a tensor, not called in a forward

OPAQUE = "\0opaque"  # stands for an attribute value that is not sent
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


# ── what classes have in a worker ──────────────────────────────────────────────────────────────────────────────────
def describe_classes(classes: list[tuple[str, str]]) -> list[Mapping[Any, Any] | None]:
    """Return the attributes of classes, and the entries of tables, by module and name; None for what is not found."""
    return [*map(_describe_class, classes)]


def _describe_class(place: tuple[str, str]) -> Mapping[Any, Any] | None:
    module, name = place
    try:
        kind: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception:  # created while the script runs
        return None
    if not isinstance(kind, type):
        tables = enumerate(tables_of(kind))
        return {(at, key): _written_name(one) for at, table in tables for key, one in table.items() if _is_plain(key)}
    return {key: plain_value(value) for key, value in vars(kind).items()}


def plain_value(value: Any) -> Any:
    """Return a plain value; the name of a class; OPAQUE for others."""
    if isinstance(value, type):
        return f"{OPAQUE} {value.__module__}.{value.__qualname__}"
    return value if _is_plain(value) else OPAQUE


def _is_plain(value: Any) -> bool:
    """Return whether a value is a plain Python value, or a container of such."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN


# ── patches ────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Names:
    """Names of a module or class, as they were when last compared."""

    def __init__(
        self, name: str, space: Mapping[str, Any], root: str = "torch", keys: Collection[str] | None = None
    ) -> None:
        self.name, self._space, self._root, self._keys = name, space, root, keys
        self._first, self._last = dict(space), [_NEVER]
        self._found = ""

    def find_replaced(self) -> str:
        """Return one that the script has replaced; '' if there is none."""
        values = [*self._space.values()] if self._keys is None else [*map(self._space.get, self._keys)]
        if not _same(values, self._last):
            self._last, self._found = values, self._find_foreign()
        return f"{self.name}.{self._found}" if self._found else ""

    def _find_foreign(self) -> str:
        keys = [*self._space] if self._keys is None else self._space.keys() & self._keys
        return next((key for key in keys if self._is_foreign(key, self._space[key])), "")

    def _is_foreign(self, name: str, value: Any) -> bool:
        if (self._root == self.name == "torch" and name not in _OPS) or name in _IDLE:
            return False
        author = _author(value)
        if author is None or _root(author) == "gemini":  # which computes the same
            return False
        if is_user_module(author) or (self._root == "torch" and isinstance(value, functools.partial)):  # torch has none
            return True
        first = self._first.get(name, value)
        if first is not value and _root(_author(first) or "") != "gemini":
            return True
        if _root(author) in (self._root, *_OWN) or _root(author) in sys.stdlib_module_names:
            return self._root == "torch" and _is_another(name, value)
        return str(value.__qualname__) not in (f"{self.name}.{name}", name)  # decorators keep the name


class _Members(_Names):
    """Names of a class: attributes that are no functions count as well."""

    def __init__(self, kind: type) -> None:
        super().__init__(kind.__qualname__, vars(kind), _root(kind.__module__))
        self.kind = kind
        self._fresh: Mapping[str, Any] | None = None  # as in a worker

    def learn(self, fresh: Mapping[str, Any]) -> None:
        """Set the attributes that the class has in a process that never ran the script."""
        self._fresh, self._last = fresh, [_NEVER]

    def _find_foreign(self) -> str:
        missing = (key for key in self._fresh or () if key not in self._space and key[:2] != "__")
        return super()._find_foreign() or next(missing, "")

    def _is_foreign(self, name: str, value: Any) -> bool:
        author = _author(value)
        if author is not None or name[:2] == "__" or isinstance(value, _DESCRIPTORS):
            return super()._is_foreign(name, value)
        now, before = value, self._first.get(name, _NEVER)
        if self._fresh is not None and (plain_value(value) != OPAQUE or self._fresh.get(name) != OPAQUE):
            now, before = plain_value(value), self._fresh.get(name, _NEVER)
        is_same = now is before or (type(now) is type(before) and _equal(now, before))
        return not is_same and not _stores(self.kind, name)


class _Additions(_Members):
    """Names that are added to nn.Module: comparing all of it would take long."""

    def __init__(self) -> None:
        super().__init__(nn.Module)
        self._size = 0

    def find_replaced(self) -> str:
        """Return one that the script has added; '' if there is none."""
        if len(self._space) != self._size:
            self._size, self._found = len(self._space), self._find_foreign()
        return f"{self.name}.{self._found}" if self._found else ""

    def learn(self, fresh: Mapping[str, Any]) -> None:
        """Set the attributes that the class has in a process that never ran the script."""
        super().learn(fresh)
        self._size = 0

    def _is_foreign(self, name: str, value: Any) -> bool:
        if name in (self._first if self._fresh is None else self._fresh):
            return False
        author = _author(value)
        return is_user_module(author) if author is not None else super()._is_foreign(name, value)


class _Table(_Names):
    """Functions in a table of a library: those that it has in a worker count, no matter who wrote them."""

    def __init__(self, place: tuple[str, str], at: int, table: dict[Any, Any]) -> None:
        super().__init__(".".join(place), table, _root(place[0]))
        self.place, self._at = place, at
        self._fresh: Mapping[Any, Any] | None = None  # as in a worker

    def learn(self, fresh: Mapping[Any, Any]) -> None:
        """Set the entries that the table has in a process that never ran the script."""
        self._fresh, self._last = fresh, [_NEVER]

    def _is_foreign(self, name: Any, value: Any) -> bool:
        if super()._is_foreign(name, value):
            return True
        written = _written_name(value)
        if self._fresh is None or not written or _root(written) == "gemini" or not _is_plain(name):
            return False
        return bool(self._fresh.get((self._at, name)) != written)


class LibraryPatches(ChangeGuard):
    """Patches of the library classes of a model's modules, and of the functions that they reach."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for part in model.modules() for kind in type(part).__mro__}
        found = [kind for kind in kinds if kind not in (nn.Module, object) and not is_user_module(kind.__module__)]
        self._members = [_Additions(), *map(_Members, found)]
        self._names: list[_Names] = [*self._members]
        reach = find_reachable(kinds)
        for name, keys in reach.found.items():
            self._names.append(_Names(name, vars(sys.modules[name]), _root(name), sorted(keys)))
        self._tables = [_Table(place, at, one) for place, tables in reach.tables for at, one in enumerate(tables)]
        self._names += self._tables

    def library_classes(self) -> list[tuple[str, str]]:
        """Return the classes and tables, by module and name, whose contents in a worker are of interest."""
        return [
            *((one.kind.__module__, one.kind.__qualname__) for one in self._members),
            *(one.place for one in self._tables),
        ]

    def learn(self, described: Sequence[Mapping[Any, Any] | None]) -> None:
        """Set their contents in a worker; None for one that is not found there."""
        watched: list[_Members | _Table] = [*self._members, *self._tables]
        for one, fresh in zip(watched, described, strict=True):
            if fresh is not None:
                one.learn(fresh)

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - the model it was made for
        """Return why the model cannot run in a worker, or None."""
        found = next(filter(None, map(_Names.find_replaced, self._names)), "")
        return f"the script has replaced {found}" if found else None


def find_torch_patch() -> str:
    """Return a function of torch that the script has replaced, by name; '' if there is none."""
    return next(filter(None, map(_Names.find_replaced, _TORCH)), "")


def _author(value: Any) -> str | None:
    """Return the module that a function is written in; None for other values."""
    if isinstance(value, functools.partial):
        return _author(value.func)
    if isinstance(value, types.MethodType):
        return _author(value.__func__)
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__", ""))
    if isinstance(value, _COMPILED):
        return "torch"
    return type(value).__module__ if callable(value) and is_user_module(type(value).__module__) else None


def _written_name(value: Any) -> str:
    """Return the name under which a function was written; '' for other values."""
    return "" if _author(value) is None else f"{_author(value)}.{getattr(value, '__qualname__', '')}"


def _is_another(name: str, value: Any) -> bool:
    """Return whether a function of torch is one that torch has under another name (`F.gelu = torch.relu`)."""
    own = getattr(value, "__name__", name)
    if name.startswith("_") or own.replace("_", "").endswith(name.replace("_", "")):  # `torch.linalg.linalg_inv`
        return False
    return any(vars(space).get(own) is value for space in (torch, torch.nn.functional))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values that cannot be compared
        return False


def _stores(kind: type, name: str) -> bool:
    """Return whether code of a library class sets an attribute of this name on the class: then it is no patch."""
    functions = (one for base in kind.__mro__ for member in vars(base).values() for one in functions_of(member))
    return any(name in attributes_stored_in(one.__code__) for one in functions if not is_user_module(one.__module__))


def _same(values: list[Any], before: list[Any]) -> bool:
    """Return whether both have the same objects: lists compare identities first, and fast."""
    try:
        return values == before
    except Exception:  # values that cannot be compared
        return False


def _root(name: str) -> str:
    return name.partition(".")[0]


_NEVER = object()
_TORCH = [
    _Names(one.__name__, vars(one))
    for one in (torch.nn.functional, torch, torch.linalg, torch.fft, torch.special)
]  # fmt: skip
_TORCH.append(_Names("torch.Tensor", vars(torch.Tensor)))
