"""Bytecode: the names of globals and attributes that a function uses."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_BY_STRINGS = frozenset(
    ("getattr", "hasattr", "__getattribute__", "vars", "__dict__", "attrgetter")
)  # take names as strings


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code and its nested functions.

    Strings are included if the code reads attributes by strings.
    """
    found = {name for one in _codes(code) for name in one.co_names}
    return found if found.isdisjoint(_BY_STRINGS) else found | strings_in(code)


def globals_in(code: types.CodeType) -> set[str]:
    """Return the names of globals only."""
    return {step.argval for one in _codes(code) for step in dis.get_instructions(one) if step.opname in _LOADS}


def imports_in(code: types.CodeType) -> set[str]:
    """Return the modules that code imports when it runs."""
    return {step.argval for one in _codes(code) for step in dis.get_instructions(one) if step.opname == "IMPORT_NAME"}


def attributes_stored_in(code: types.CodeType) -> set[str]:
    """Return the attributes that code sets, except those of `self`."""
    steps = [step for one in _codes(code) for step in dis.get_instructions(one)]
    return {step.argval for last, step in pairwise(steps) if step.opname == "STORE_ATTR" and not _loads_self(last)}


def _loads_self(step: dis.Instruction) -> bool:
    loaded = (
        step.argval[-1:] if isinstance(step.argval, tuple) else (step.argval,)
    )  # an instruction that loads two variables
    return step.opname.startswith("LOAD_FAST") and loaded == ("self",)


def strings_in(code: types.CodeType) -> set[str]:
    """Return the strings in code that may be names."""
    found = (constant for one in _codes(code) for constant in one.co_consts)
    return {constant for constant in found if isinstance(constant, str) and constant.isidentifier()}


def functions_of(member: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a method, a property or a static method."""
    for one in (member, *(part_of(member, part) for part in ("fget", "func", "__func__", "__wrapped__"))):
        if isinstance(one, types.FunctionType):
            yield one


def parts_of(member: Any) -> list[Any]:
    """Return what a member of a class calls its function with or by: arguments of a partial method, a dispatcher."""
    if isinstance(member, functools.partialmethod):
        return [*member.args, *member.keywords.values()]
    return [member.dispatcher] if isinstance(member, functools.singledispatchmethod) else []


def part_of(value: Any, name: str) -> Any:
    """Return an attribute, or None: `__getattr__` of a user object may raise anything."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
