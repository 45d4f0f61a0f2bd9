"""Ways: a plan for the way that a call goes through branches on random numbers, now.

The whole batch is captured, from the state in which the generator is: so it goes the way that the call will go. Any
other plan is captured on one micro-batch, whichever way that goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_this: ContextVar[bool] = ContextVar("this", default=False)


@contextmanager
def this_way() -> Iterator[None]:
    """Inside, plans are made for the way that the generator says."""
    before = _this.set(True)
    try:
        yield
    finally:
        _this.reset(before)


def is_given() -> bool:
    """Whether a plan is to be for that way."""
    return _this.get()
