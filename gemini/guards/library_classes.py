"""Described: what classes of libraries have in a process where the program never ran."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import reduce
from typing import Any

OPAQUE = "\0opaque"  # in the place of what is not sent
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def describe_classes(classes: list[tuple[str, str]]) -> list[Mapping[str, Any] | None]:
    """The attributes of classes, by module and name; None for one that is not found."""
    return [*map(_described, classes)]


def _described(place: tuple[str, str]) -> Mapping[str, Any] | None:
    module, name = place
    try:
        kind: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception:  # made while the program runs
        return None
    if not isinstance(kind, type):
        return None
    return {key: plain_value(value) for key, value in vars(kind).items()}


def plain_value(value: Any) -> Any:
    """A plain value; the name of a class; OPAQUE for others."""
    if isinstance(value, type):
        return f"{OPAQUE} {value.__module__}.{value.__qualname__}"
    return value if _is_plain(value) else OPAQUE


def _is_plain(value: Any) -> bool:
    """Whether a value is one of Python's own, or a container of such."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return type(value) in _PLAIN
