"""Callables as data: closures, partial applications and bound methods, decomposed and rebuilt.

A mask function made by another function (`causal(window)` returning an inner function) is data plus code. The code
is found through the importable outer function, the data are the cells of the closure.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

from gemini.ir.import_paths import Symbol, symbol_of


@dataclass(frozen=True)
class ClosureForm:
    """A function defined inside an importable one: the path to its code, and the forms of its cells and defaults."""

    outer: Symbol
    indices: tuple[int, ...]  # positions among the constants of the enclosing code objects
    name: str
    cells: tuple[Any, ...]
    defaults: tuple[Any, ...]


@dataclass(frozen=True)
class PartialForm:
    """`functools.partial(function, *args, **kwargs)`."""

    function: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MethodForm:
    """A method bound to an object."""

    owner: Any
    name: str


def decompose(value: Any) -> tuple[Any, ...] | None:
    """Return (kind, …parts) of a callable that has parts; None for any other."""
    if isinstance(value, functools.partial):
        return ("partial", value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType) and getattr(type(value.__self__), value.__name__, None) is not None:
        return ("method", value.__self__, value.__name__)
    if isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__ and not value.__kwdefaults__:
        found = _find_code(value)
        if found is not None:
            cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return ("closure", *found, cells, value.__defaults__ or ())
    return None


def _find_code(function: types.FunctionType) -> tuple[Symbol, tuple[int, ...]] | None:
    """Return the importable outermost function and the path from its code to that of `function`."""
    path, _, _ = function.__qualname__.partition(".<locals>")
    symbol = Symbol(function.__module__, path)
    try:
        outer = symbol.resolve()
    except (ImportError, AttributeError):
        return None
    while hasattr(outer, "__wrapped__"):
        outer = outer.__wrapped__
    code = getattr(outer, "__code__", None)
    indices = _search(code, function.__code__) if code is not None else None
    return None if indices is None else (symbol, indices)


def _search(code: types.CodeType, wanted: types.CodeType) -> tuple[int, ...] | None:
    for index, constant in enumerate(code.co_consts):
        if constant is wanted:
            return (index,)
        if isinstance(constant, types.CodeType):
            deeper = _search(constant, wanted)
            if deeper is not None:
                return (index, *deeper)
    return None


def rebuild_closure(form: ClosureForm, cells: list[Any], defaults: tuple[Any, ...]) -> types.FunctionType:
    """Rebuild a function with new cells."""
    outer = form.outer.resolve()
    while hasattr(outer, "__wrapped__"):
        outer = outer.__wrapped__
    code = outer.__code__
    for index in form.indices:
        code = code.co_consts[index]
    closure = tuple(types.CellType(cell) for cell in cells)
    return types.FunctionType(code, outer.__globals__, form.name, defaults or None, closure or None)


__all__ = ["ClosureForm", "MethodForm", "PartialForm", "decompose", "rebuild_closure", "symbol_of"]
