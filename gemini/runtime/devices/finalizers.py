"""When an object is gone, something is done that no signal can interrupt.

`weakref.finalize` runs Python code, between whose instructions a signal's handler may raise: in a finalizer such an
exception, a Ctrl-C say, is printed and lost, and what was to be done is not. Here, from the death of the object to the
last action, no Python code runs: all is done by functions written in C, such as `deque.append` in a `partial`.
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
    """A reference that knows what to do."""

    __slots__ = ("act",)
    act: Callable[[], Any]


def call_when_freed(thing: Any, *acts: Callable[[], Any]) -> None:
    """Call all `acts`, in order, when `thing` is freed; not at the end of the program."""
    watch = _Watch(thing, _RUN)
    key = id(watch)
    # A deque of length 0 is a loop in C: it takes all that the map has to give.
    watch.act = partial(deque, map(_CALL, (*acts, partial(_watches.pop, key, None))), 0)
    _watches[key] = watch


_RUN, _CALL = methodcaller("act"), methodcaller("__call__")
