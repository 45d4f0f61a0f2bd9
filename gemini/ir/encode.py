"""Encoding of values: arguments and results of nodes as forms (`gemini.ir.pytree`), and back.

The arguments of a call are nested containers of tensors, numbers and plain Python values. An `Encoder` turns them
into a *form*, plain data in which every tensor is a `Ref` to the node that made it and every traced number its
expression; `decode` rebuilds them from the values of a later run. Mutable objects (a key–value cache, a dataclass)
are decomposed and rebuilt: a graph holds no live object of the captured call.

    (x, {"mask": None, "n": b * 2})   →   Sequence(tuple, [Ref(3), Mapping(dict, [("mask", Literal(None)), …])])
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.ir.callables import ClosureForm, MethodForm, PartialForm, decompose, rebuild_closure
from gemini.ir.import_paths import Symbol, symbol_of
from gemini.ir.pytree import (
    BackReference,
    Form,
    Literal,
    MappingForm,
    ModelObject,
    Number,
    ObjectForm,
    Path,
    Ref,
    SequenceForm,
    SliceForm,
    Step,
)
from gemini.ir.symint import TracedFloat, TracedInt, to_plain

LITERALS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
    range,
)
_MAX_DEPTH = 24


class UnsupportedValueError(Exception):
    """A value that has no form."""


def attributes(value: Any) -> dict[str, Any]:
    """Return the instance attributes of an object, with or without a `__dict__`."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    if isinstance(value, collections.defaultdict):
        found["default_factory"] = value.default_factory
    return found


def _is_made_by_c(cls: type) -> bool:
    """Return whether instances hold state beyond their attributes: only the constructor can make them."""
    return any(isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in cls.__mro__[:-1])


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, *LITERALS)) or callable(value):
        return False
    if isinstance(value, (np.ndarray, np.generic, set, frozenset, torch.Generator)):
        return False
    cls = type(value)
    return cls.__module__ != "builtins" and cls.__flags__ & (1 << 9) != 0  # a class made by Python code


def children(value: Any) -> list[tuple[Step, Any]] | None:
    """Return the parts of a container with the step to each; None for a value without parts."""
    if isinstance(value, (list, tuple)):
        return [(("i", index), part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        parts: list[tuple[Step, Any]] = [(("k", key), part) for key, part in value.items()]
        if type(value) is not dict:
            parts += [(("a", key), part) for key, part in attributes(value).items()]
        return parts
    if isinstance(value, slice):
        return [(("a", name), getattr(value, name)) for name in ("start", "stop", "step")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(("a", key), part) for key, part in attributes(value).items()]
    if _is_plain_object(value):
        return [(("a", key), part) for key, part in attributes(value).items()]
    return None


def walk(value: Any, path: Path = (), seen: set[int] | None = None) -> Iterator[tuple[Path, Any]]:
    """Yield all leaves of nested containers with their paths, depth first; each object is entered once."""
    seen = set() if seen is None else seen
    parts = children(value)
    if parts is None:
        yield path, value
        return
    if id(value) in seen or len(path) > _MAX_DEPTH:
        return
    seen.add(id(value))
    for step, part in parts:
        yield from walk(part, (*path, step), seen)


def tensors(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield all tensors in nested containers with their paths."""
    if isinstance(value, torch.Tensor):
        yield (), value
        return
    for path, leaf in walk(value):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def follow(value: Any, path: Path) -> Any:
    """Return the part of nested containers that a path leads to."""
    for kind, key in path:
        value = getattr(value, key) if kind == "a" else value[key]
    return value


def strip(value: Any) -> Any:
    """Replace traced numbers by plain ones; unchanged parts keep their identity, so that mutations stay visible."""
    if isinstance(value, (TracedInt, TracedFloat)):
        return to_plain(value)
    if isinstance(value, slice):
        return slice(strip(value.start), strip(value.stop), strip(value.step))
    if isinstance(value, (list, tuple)):
        parts = [strip(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return parts if type(value) is list else _make_sequence(type(value), parts)
    if isinstance(value, dict) and type(value) is dict:
        stripped = {key: strip(part) for key, part in value.items()}
        return value if all(stripped[key] is part for key, part in value.items()) else stripped
    return value


class Encoder:
    """Turns values into forms. `resolve` returns the origin of a tensor, `owner` that of an object of the model."""

    def __init__(
        self,
        resolve: Callable[[torch.Tensor], Ref],
        owner: Callable[[Any], ModelObject | None],
        array: Callable[[Any], Ref | None] = lambda _: None,
    ) -> None:
        self.resolve, self.owner, self.array = resolve, owner, array
        self.labels: dict[int, int] = {}

    def __call__(self, value: Any) -> Form:
        """Return the form of a value."""
        self.labels = {}
        return self._form(value, 0)

    def _form(self, value: Any, depth: int) -> Form:
        if isinstance(value, torch.Tensor):
            return self.resolve(value)
        if isinstance(value, (TracedInt, TracedFloat)):
            return Number(value.expr)
        if isinstance(value, enum.Enum) or (callable(value) and not isinstance(value, nn.Module)):
            return self._callable(value, depth)
        if isinstance(value, LITERALS):
            return Literal(value)
        if isinstance(value, np.generic):
            return Literal(value.item())
        if id(value) in self.labels:
            return BackReference(self.labels[id(value)])
        if depth > _MAX_DEPTH:
            raise UnsupportedValueError(f"a {type(value).__name__} nested more than {_MAX_DEPTH} deep")
        return self._container(value, depth + 1)

    def _callable(self, value: Any, depth: int) -> Form:
        known = self.owner(value) or symbol_of(value)
        if known is not None:
            return known
        parts = decompose(value)
        if parts is None or depth > _MAX_DEPTH:
            raise UnsupportedValueError(f"a {type(value).__name__} that cannot be imported: {value!r:.80}")
        kind, *rest = parts
        if kind == "method":
            return MethodForm(self._form(rest[0], depth + 1), rest[1])
        if kind == "partial":
            function, args, kwargs = rest
            keywords = tuple((key, self._form(part, depth + 1)) for key, part in kwargs.items())
            return PartialForm(self._form(function, depth + 1), self._forms(args, depth + 1), keywords)
        outer, indices, cells, defaults = rest
        forms = self._forms(cells, depth + 1), self._forms(defaults, depth + 1)
        return ClosureForm(outer, indices, value.__name__, *forms)

    def _forms(self, parts: Any, depth: int) -> tuple[Form, ...]:
        return tuple(self._form(part, depth) for part in parts)

    def _container(self, value: Any, depth: int) -> Form:
        if isinstance(value, slice):
            return SliceForm(*(self._form(part, depth) for part in (value.start, value.stop, value.step)))
        if isinstance(value, tuple):
            return self._sequence(value, depth)
        owned = self.owner(value)
        if owned is not None:
            return owned
        if isinstance(value, (set, frozenset)) and all(isinstance(part, LITERALS) for part in value):
            return Literal(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, list):
            return self._sequence(value, depth)
        label = self.labels[id(value)] = len(self.labels)
        if isinstance(value, dict):
            items = tuple((key, self._form(part, depth)) for key, part in value.items())
            state = () if type(value) is dict else self._state(value, depth)
            return MappingForm(type(value), items, state, label)
        is_record = (dataclasses.is_dataclass(value) and not isinstance(value, type)) or _is_plain_object(value)
        if is_record and not _is_made_by_c(type(value)):
            return ObjectForm(type(value), self._state(value, depth), label)
        raise UnsupportedValueError(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _array(self, value: Any) -> Form:
        if value.dtype == object:
            raise UnsupportedValueError("an array of Python objects")
        return self.array(value) or Literal(value)

    def _sequence(self, value: Any, depth: int) -> SequenceForm:
        label = self.labels[id(value)] = len(self.labels)
        return SequenceForm(type(value), tuple(self._form(part, depth) for part in value), label)

    def _state(self, value: Any, depth: int) -> tuple[tuple[str, Form], ...]:
        return tuple((key, self._form(part, depth)) for key, part in attributes(value).items())


def _make_sequence(cls: type, parts: list[Any]) -> Any:
    if cls is list:
        return parts
    if cls is tuple:
        return tuple(parts)
    if cls is torch.Size:
        return torch.Size(parts)
    if issubclass(cls, list):
        made = cls.__new__(cls)
        made.extend(parts)
        return made
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types.*: a C structure, made from one iterable
        return cls(parts)  # type: ignore[call-arg]
    return tuple.__new__(cls, parts)  # type: ignore[type-var]


def decode(form: Any, read: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """Return the value of a form; `read` returns that of a `Ref`, `Number` or `ModelObject`."""
    kind = type(form)
    if kind is Literal:
        return form.value
    if kind is Ref or kind is Number or kind is ModelObject:
        return read(form)
    made = {} if made is None else made
    if kind is SequenceForm:
        sequence = _make_sequence(form.cls, [decode(part, read, made) for part in form.items])
        made[form.label] = sequence
        return sequence
    if kind is MappingForm:
        return _decode_mapping(form, read, made)
    if kind is SliceForm:
        return slice(*(decode(part, read, made) for part in (form.start, form.stop, form.step)))
    if kind is Symbol:
        return form.resolve()
    if kind is BackReference:
        return made[form.label]
    if kind is ClosureForm or kind is PartialForm or kind is MethodForm:
        return _decode_callable(form, read, made)
    record = made[form.label] = object.__new__(form.cls)
    for key, part in form.state:
        object.__setattr__(record, key, decode(part, read, made))
    return record


def _decode_callable(form: Any, read: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    if isinstance(form, MethodForm):
        return getattr(decode(form.owner, read, made), form.name)
    if isinstance(form, PartialForm):
        args = [decode(part, read, made) for part in form.args]
        kwargs = {key: decode(part, read, made) for key, part in form.kwargs}
        return functools.partial(decode(form.function, read, made), *args, **kwargs)
    defaults = tuple(decode(part, read, made) for part in form.defaults)
    return rebuild_closure(form, [decode(part, read, made) for part in form.cells], defaults)


def _decode_mapping(form: MappingForm, read: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    if form.cls is dict:
        plain_dict = made[form.label] = {}
        plain_dict.update((key, decode(part, read, made)) for key, part in form.items)
        return plain_dict
    cls: Any = form.cls
    mapping = made[form.label] = cls.__new__(cls)
    # The base class's own setter: a subclass may add behaviour that the state below already reflects.
    base: Any = next(base for base in cls.__mro__ if base.__module__ in ("builtins", "collections"))
    for key, part in form.items:
        base.__setitem__(mapping, key, decode(part, read, made))
    for key, part in form.state:
        object.__setattr__(mapping, key, decode(part, read, made))
    return mapping
