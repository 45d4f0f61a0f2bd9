"""Caches: memoized functions of the model's code, emptied around a trace.

A tensor that an earlier call left in a `functools.lru_cache` has no origin in the trace; emptied, the function
runs and is recorded. Afterwards it must not keep what the trace put there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn


def find_caches(model: nn.Module) -> list[Any]:
    """The memoized functions in the modules and classes that define the model."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if cls.__module__ != "builtins"}
    found: dict[int, Any] = {}
    for cls in classes:
        if cls.__module__.startswith("torch."):
            continue
        for space in (
            vars(cls),
            vars(
                sys.modules.get(cls.__module__, object()),
            )
            if cls.__module__ in sys.modules
            else {},
        ):
            for value in list(space.values()):
                for cache in _caches(value):
                    found[id(cache)] = cache
    return list(found.values())


def _caches(value: Any) -> Iterator[Any]:
    value = getattr(value, "__func__", value)  # a static or class method
    if hasattr(value, "cache_clear") and hasattr(value, "cache_info"):
        yield value
        return
    for cell in getattr(value, "__closure__", None) or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if hasattr(inner, "cache_clear") and hasattr(inner, "cache_info"):
            yield inner


def clear(caches: list[Any]) -> None:
    """Empty them."""
    for cache in caches:
        cache.cache_clear()
