"""Names in code: the globals and attributes that a function reads, as its bytecode has them."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return found


def globals_in(code: types.CodeType) -> set[str]:
    """The names of globals alone."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname in _LOADS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_in(constant)
    return found


def functions_of(member: Any) -> Iterator[types.FunctionType]:
    """The functions of a method, a property, a static method."""
    for one in (member, *(getattr(member, part, None) for part in ("fget", "__func__", "__wrapped__"))):
        if isinstance(one, types.FunctionType):
            yield one
