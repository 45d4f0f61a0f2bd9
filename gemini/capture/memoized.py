"""Memoized functions of the model's code, whose caches are cleared around a trace.

A tensor, or a sample count, that an earlier call left in a `functools.lru_cache` has no origin in the trace; with the
cache cleared, the function runs and is recorded. Afterwards the entries of the trace are removed, and during the trace
those of opaque regions, whose Python is not recorded. Caches are searched in the modules that define the model's
classes, and in those whose functions these import (einops). A function that uses random numbers is not cleared: it
would return other numbers than the cached ones.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from gemini.capture.rng_use import names_rng
from gemini.user_code import is_user_module

MEMOIZED = functools._lru_cache_wrapper
_CALL_DEPTH = 3  # nested calls that are searched


def find_caches(model: nn.Module) -> list[Any]:
    """Return the memoized functions in the modules and classes that define the model, and in modules they import."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if _may_cache(cls.__module__)}
    names = {cls.__module__ for cls in classes}
    found: dict[int, Any] = {}
    for space in (*map(vars, classes), *map(_namespace, names)):
        for value in list(space.values()):
            for cache in _caches(value):
                found[id(cache)] = cache
    for other in {one for name in names for one in _imported_from(name)} - names:
        found.update((id(value), value) for value in list(_namespace(other).values()) if _takes_arguments(value))
    return [cache for cache in found.values() if not uses_rng(cache)]


def uses_rng(cache: Any) -> bool:
    """Return whether a memoized user function may use random numbers, by the names in its code.

    It is not called: it may be slow or have side effects.
    """
    if not isinstance(cache, MEMOIZED) or not cache.cache_info().currsize:
        return False
    return is_user_module(cache.__module__) and _may_use_rng(cache.__wrapped__, _CALL_DEPTH)


def _may_use_rng(function: Any, depth: int) -> bool:
    """Return whether the code of a function, or of user functions it calls by name, names a random function."""
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None:
        return False
    names = set(_names(code))
    if names_rng(names):
        return True
    called = [space[name] for name in names if isinstance(space.get(name), types.FunctionType)] if depth else []
    return any(_may_use_rng(one, depth - 1) for one in called if is_user_module(one.__module__))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def _takes_arguments(value: Any) -> bool:
    """Return whether a memoized function takes arguments: others (installed packages) do not depend on a call."""
    code = getattr(value.__wrapped__, "__code__", None) if isinstance(value, MEMOIZED) else None
    return code is not None and code.co_argcount > 0


def _imported_from(name: str) -> Iterator[str]:
    """Yield the modules that define the functions in a module's namespace."""
    for value in list(_namespace(name).values()):
        if isinstance(value, types.FunctionType) and _may_cache(value.__module__):
            yield value.__module__


def _may_cache(name: str | None) -> bool:
    return name is not None and name != "builtins" and name.partition(".")[0] not in ("torch", "gemini")


def _namespace(name: str) -> dict[str, Any]:
    return vars(sys.modules[name]) if name in sys.modules else {}


def _caches(value: Any) -> Iterator[Any]:
    if isinstance(value, type):
        return
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if _is_cache(value):
        yield value
        return
    for cell in (value.__closure__ or ()) if isinstance(value, types.FunctionType) else ():
        try:
            inner = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if _is_cache(inner):
            yield inner


def _is_cache(value: Any) -> bool:
    """Return whether a value is a memoized function, without `getattr`: a user object may have any attribute."""
    own = vars(value) if isinstance(value, types.FunctionType) else {}
    return all(name in own or hasattr(type(value), name) for name in ("cache_clear", "cache_info"))


def clear_caches(caches: list[Any]) -> None:
    """Clear these caches."""
    for cache in caches:
        cache.cache_clear()


def miss_counts(caches: Sequence[Any]) -> list[Any]:
    """Return the number of misses of each cache."""
    return [getattr(info, "misses", info) for info in (cache.cache_info() for cache in caches)]


def clear_filled(caches: Sequence[Any], before: list[Any]) -> None:
    """Clear the caches with misses since `before`."""
    for cache, then, now in zip(caches, before, miss_counts(caches), strict=True):
        if then != now:
            cache.cache_clear()
