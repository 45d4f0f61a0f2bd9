"""Codec: forms and nodes as JSON, without pickle.

A form becomes `[tag, …]`; strings, finite numbers, booleans and null are written as they are. Classes and functions
are written as import paths. Arrays are collected in `arrays`, which go to a safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gemini.errors import CaptureError
from gemini.ir.callables import ClosureForm, MethodForm, PartialForm
from gemini.ir.import_paths import Symbol, symbol_of
from gemini.ir.pytree import (
    BackReference,
    Literal,
    MappingForm,
    ModelObject,
    Number,
    ObjectForm,
    Ref,
    SequenceForm,
    SliceForm,
)
from gemini.ir.symint import Expr

_TORCH = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "format"}


class Writer:
    """Encodes values as JSON."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Encode a value."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            return value if isinstance(value, int) or math.isfinite(value) else ["float", repr(value)]
        for kind, tag in _TORCH.items():
            if isinstance(value, kind):
                return [tag, str(value).removeprefix("torch.")]
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(self, value)
        if isinstance(value, type):
            return self.cls(value)
        raise CaptureError(f"a graph with a {type(value).__module__}.{type(value).__qualname__} cannot be saved")

    def all(self, values: Any) -> list[Any]:
        """Encode several values."""
        return [self(value) for value in values]

    def pairs(self, values: Any) -> list[Any]:
        """Encode (key, value) pairs."""
        return [[self(key), self(value)] for key, value in values]

    def cls(self, value: type) -> Any:
        """Encode a class."""
        symbol = symbol_of(value)
        if symbol is None:
            raise CaptureError(
                f"the class {value.__qualname__} is local to a function and cannot be found again\n"
                "    → define it at the top of its module"
            )
        return ["class", symbol.module, symbol.qualname]

    def array(self, value: Any) -> Any:
        """Collect an array and encode its name."""
        name = f"array.{len(self.arrays)}"
        self.arrays[name] = torch.from_numpy(np.ascontiguousarray(value)).clone()
        return ["array", name, list(value.shape)]


_WRITERS: dict[type, Callable[[Writer, Any], Any]] = {
    Literal: lambda w, v: ["literal", w(v.value)],
    Number: lambda w, v: ["number", w(v.expr)],
    Expr: lambda w, v: ["expr", v.op, w.all(v.operands)],
    Ref: lambda w, v: ["ref", v.node, v.source, w(v.path)],
    SequenceForm: lambda w, v: ["sequence", w.cls(v.cls), w.all(v.items), v.label],
    MappingForm: lambda w, v: ["mapping", w.cls(v.cls), w.pairs(v.items), w.pairs(v.state), v.label],
    ObjectForm: lambda w, v: ["record", w.cls(v.cls), w.pairs(v.state), v.label],
    BackReference: lambda _, v: ["again", v.label],
    SliceForm: lambda w, v: ["slice", w(v.start), w(v.stop), w(v.step)],
    ModelObject: lambda _, v: ["owned", v.module, v.attribute],
    Symbol: lambda _, v: ["symbol", v.module, v.qualname],
    ClosureForm: lambda w, v: ["closure", w(v.outer), list(v.indices), v.name, w.all(v.cells), w.all(v.defaults)],
    PartialForm: lambda w, v: ["partial", w(v.function), w.all(v.args), w.pairs(v.kwargs)],
    MethodForm: lambda w, v: ["method", w(v.owner), v.name],
    tuple: lambda w, v: ["tuple", w.all(v)],
    list: lambda w, v: ["list", w.all(v)],
    dict: lambda w, v: ["dict", w.pairs(v.items())],
    set: lambda w, v: ["set", sorted(w.all(v), key=repr)],
    frozenset: lambda w, v: ["frozenset", sorted(w.all(v), key=repr)],
    complex: lambda _, v: ["complex", v.real, v.imag],
    bytes: lambda _, v: ["bytes", v.hex()],
    range: lambda _, v: ["range", v.start, v.stop, v.step],
    torch.device: lambda _, v: ["device", str(v)],
    torch.Size: lambda _, v: ["size", list(v)],
    type(Ellipsis): lambda _, __: ["ellipsis"],
    np.ndarray: lambda w, v: w.array(v),
}


class Reader:
    """Decodes values from JSON."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def __call__(self, data: Any) -> Any:
        """Decode a value."""
        if not isinstance(data, list):
            return data
        reader = _READERS.get(data[0]) if data and isinstance(data[0], str) else None
        if reader is None:
            raise CaptureError(f"not a value of a graph: {data!r:.80}")
        return reader(self, *data[1:])

    def all(self, data: list[Any]) -> tuple[Any, ...]:
        """Decode several values."""
        return tuple(self(part) for part in data)

    def pairs(self, data: list[Any]) -> tuple[tuple[Any, Any], ...]:
        """Decode (key, value) pairs."""
        return tuple((self(key), self(value)) for key, value in data)


def _class(_: Reader, module: str, qualname: str) -> Any:
    found = Symbol(module, qualname).resolve()
    if not isinstance(found, type):
        raise CaptureError(f"{module}.{qualname} is not a class")
    return found


_READERS: dict[str, Callable[..., Any]] = {
    "literal": lambda r, value: Literal(r(value)),
    "number": lambda r, expr: Number(r(expr)),
    "expr": lambda r, op, operands: Expr(op, r.all(operands)),
    "ref": lambda r, node, source, path: Ref(node, source, r(path)),
    "sequence": lambda r, cls, items, label: SequenceForm(r(cls), r.all(items), label),
    "mapping": lambda r, cls, items, state, label: MappingForm(r(cls), r.pairs(items), r.pairs(state), label),
    "record": lambda r, cls, state, label: ObjectForm(r(cls), r.pairs(state), label),
    "again": lambda _, label: BackReference(label),
    "slice": lambda r, start, stop, step: SliceForm(r(start), r(stop), r(step)),
    "owned": lambda _, module, attribute: ModelObject(module, attribute),
    "symbol": lambda _, module, qualname: Symbol(module, qualname),
    "closure": lambda r, outer, indices, name, cells, defaults: ClosureForm(
        r(outer), tuple(indices), name, r.all(cells), r.all(defaults)
    ),
    "partial": lambda r, function, args, kwargs: PartialForm(r(function), r.all(args), r.pairs(kwargs)),
    "method": lambda r, owner, name: MethodForm(r(owner), name),
    "class": _class,
    "tuple": lambda r, parts: r.all(parts),
    "list": lambda r, parts: list(r.all(parts)),
    "dict": lambda r, parts: dict(r.pairs(parts)),
    "set": lambda r, parts: set(r.all(parts)),
    "frozenset": lambda r, parts: frozenset(r.all(parts)),
    "complex": lambda _, real, imag: complex(real, imag),
    "bytes": lambda _, text: bytes.fromhex(text),
    "range": lambda _, start, stop, step: range(start, stop, step),
    "float": lambda _, text: float(text),
    "dtype": lambda _, name: getattr(torch, name),
    "layout": lambda _, name: getattr(torch, name),
    "format": lambda _, name: getattr(torch, name),
    "device": lambda _, name: torch.device(name),
    "size": lambda _, parts: torch.Size(parts),
    "ellipsis": lambda _: ...,
    "array": lambda r, name, shape: r.arrays[name].numpy().reshape(shape),
}
