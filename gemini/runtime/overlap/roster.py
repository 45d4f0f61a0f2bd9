"""The roster: the modules and parameters of a model, as long as it has the same ones.

To walk through a model takes long in Python, and a step needs to several times. That nothing has changed is seen in a
few loops in C: every module has the very children and parameters that it had.
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import nn

_TABLES, _VALUES = attrgetter("_modules", "_parameters"), methodcaller("values")
_WALKS = ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "_named_members")
_usual: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # classes


def _walks_as_usual(module: nn.Module) -> bool:
    """Whether it says of its modules and parameters what all modules say: others may say something else every time."""
    cls = type(module)
    if cls not in _usual:
        _usual[cls] = all(getattr(cls, name) is getattr(nn.Module, name) for name in _WALKS)
    return _usual[cls] and vars(module).keys().isdisjoint(_WALKS)


class Roster:
    """Of one model, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.identities = tuple(map(id, self.parameters))
        self._is_usual = all(map(_walks_as_usual, self.modules))
        tables = self._tables()
        self._sizes, self._held = [*map(len, tables)], [*chain.from_iterable(map(_VALUES, tables))]

    def _tables(self) -> list[dict[str, Any]]:
        return [*chain.from_iterable(map(_TABLES, self.modules))]

    def is_current(self) -> bool:
        """Whether the model still has these, in this order."""
        if not self._is_usual:
            return False
        tables = self._tables()
        return [*map(len, tables)] == self._sizes and all(
            map(is_, chain.from_iterable(map(_VALUES, tables)), self._held)
        )


def roster_of(model: nn.Module, last: Roster | None) -> Roster:
    """The roster of a model; the last one, where that is still right."""
    return last if last is not None and last.model is model and last.is_current() else Roster(model)
