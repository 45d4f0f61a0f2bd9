"""Model registry: the state of each managed model, which lives as long as the model.

The state refers to the model: plans and stages hold its modules. A global table, even one with weak keys, would keep
every model alive, so the model itself holds its state, and both are freed together. It is stored on a table of hooks
that is rarely inspected; copies and saved files of the model have None in its place.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from gemini.runtime.interception.managed_model import ManagedModel

_TABLE, _NAME = "_load_state_dict_post_hooks", "__gemini__"
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Modules without that table.
_tableless: weakref.WeakKeyDictionary[nn.Module, ManagedModel] = weakref.WeakKeyDictionary()


class _Registered:
    """The state of one model, on its table."""

    __slots__ = ("managed", "model")

    def __init__(self, model: nn.Module, managed: ManagedModel) -> None:
        self.model, self.managed = weakref.ref(model), managed

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy, or a file, has None


def register(model: nn.Module, managed: ManagedModel) -> None:
    """Attach its state to a model."""
    if _models:
        gc.collect()  # models that the script has dropped, and their memory
    _models.add(model)
    try:
        vars(vars(model)[_TABLE])[_NAME] = _Registered(model, managed)
    except (KeyError, TypeError):
        _tableless[model] = managed


def find_registered(model: nn.Module) -> ManagedModel | None:
    """Return the state of a model; None where it is not managed."""
    found = getattr(vars(model).get(_TABLE), _NAME, None)
    if found is not None:  # the table may belong to another model, as in a shallow copy
        return found.managed if found.model() is model else None
    return _tableless.get(model) if _tableless else None
