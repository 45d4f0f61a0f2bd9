"""Finalizers that no signal can interrupt.

`weakref.finalize` runs Python code, between whose instructions a signal handler may raise. In a finalizer such an
exception, a Ctrl-C for example, is printed and lost, and the action does not complete. `call_when_freed` runs no
Python code between the death of the object and the last action: everything is done by functions written in C, such as
`deque.append` in a `partial`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

_watches: dict[int, _Watch] = {}


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference with its action."""

    __slots__ = ("act",)
    act: Callable[[], Any]


def call_when_freed(thing: Any, *acts: Callable[[], Any]) -> None:
    """Call `acts` in order when `thing` is freed; not at interpreter exit."""
    watch = _Watch(thing, _RUN)
    key = id(watch)
    # A deque of length 0 is a loop in C that exhausts the map.
    watch.act = partial(deque, map(_CALL, (*acts, partial(_watches.pop, key, None))), 0)
    _watches[key] = watch


_RUN, _CALL = methodcaller("act"), methodcaller("__call__")
