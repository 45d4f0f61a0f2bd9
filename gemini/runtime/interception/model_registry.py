"""Model registry: the state of each managed model, which lives as long as the model.

The state refers to the model: plans and stages hold its modules. A global table, even one with weak keys, would keep
every model alive, so the model itself holds its state, and both are freed together:

    model ──► a table of hooks that is rarely inspected ──► state
    registry ──weak──► model, state

Copies and saved files of the model have a plain table in its place, like those of any other model.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from gemini.runtime.interception.managed_model import ManagedModel

_TABLES = ("_load_state_dict_post_hooks", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
_states: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ManagedModel]] = weakref.WeakKeyDictionary()
_unowned: list[ManagedModel] = []  # of modules without a table that can hold it


class _OwningTable(OrderedDict[int, Any]):
    """A table of hooks that also holds the state of its model."""

    __slots__ = ("managed",)

    def __init__(self, hooks: Any = (), managed: ManagedModel | None = None) -> None:
        super().__init__(hooks)
        self.managed = managed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickle and copy get of a plain table."""
        return OrderedDict(self).__reduce_ex__(protocol)

    def copy(self) -> Any:
        """Return a plain table."""
        return OrderedDict(self)

    def __repr__(self) -> str:
        return repr(OrderedDict(self))


def register(model: nn.Module, managed: ManagedModel) -> None:
    """Attach its state to a model."""
    if _states:
        gc.collect()  # models that the script has dropped, and their memory
    _states[model] = weakref.ref(managed)
    attributes = vars(model)
    for name in _TABLES:
        table = attributes.get(name)
        # The handle of a registered hook refers weakly to its table, which must stay the same.
        if type(table) is OrderedDict and not weakref.getweakrefcount(table) and not vars(table):
            attributes[name] = _OwningTable(table, managed)
            return
    _unowned.append(managed)


def find_registered(model: nn.Module) -> ManagedModel | None:
    """Return the state of a model; None where it is not managed."""
    found = _states.get(model)
    return None if found is None else found()
