"""Sameness: whether every value in some dictionaries is the very object that it was.

There are thousands of values in a model. All are in a row here, so that loops in C can tell that nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_, methodcaller
from typing import Any

_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")  # scripted modules have tables like dictionaries


class Sameness:
    """Dictionaries as they are now."""

    def __init__(self, spaces: Iterable[dict[Any, Any]]) -> None:
        watched = list(spaces)
        self._empty = [space for space in watched if not space]
        self._full = [space for space in watched if space]
        self._sizes, self._names = [*map(len, self._full)], [*chain.from_iterable(map(_KEYS, self._full))]
        self._values = [*chain.from_iterable(map(_VALUES, self._full))]

    def holds(self) -> bool:
        """Whether they have the same keys, in the same order, and the same objects."""
        return (
            not any(self._empty)
            and [*map(len, self._full)] == self._sizes
            and [*chain.from_iterable(map(_KEYS, self._full))] == self._names
            and all(map(is_, chain.from_iterable(map(_VALUES, self._full)), self._values))
        )
