"""Kept: what is known of a managed model, as long as the model.

What is known refers to the model: plans and stages hold its modules. A table of all models, even one with weak keys,
would keep every model for ever, so the model itself holds what is known of it, and both go together when nothing else
holds the model. It is put out of sight, on a table of hooks that nobody looks into; copies of the model, and files that
it is saved in, have None in its place.
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
_tableless: weakref.WeakKeyDictionary[nn.Module, ManagedModel] = weakref.WeakKeyDictionary()  # modules that have none


class _Registered:
    """What is known of one model, on its table."""

    __slots__ = ("managed", "model")

    def __init__(self, model: nn.Module, managed: ManagedModel) -> None:
        self.model, self.managed = weakref.ref(model), managed

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy, or a file, has None


def register(model: nn.Module, managed: ManagedModel) -> None:
    """Have a model hold what is known of it."""
    if _models:
        gc.collect()  # models that the program is done with, and the memory of theirs
    _models.add(model)
    try:
        vars(vars(model)[_TABLE])[_NAME] = _Registered(model, managed)
    except (KeyError, TypeError):
        _tableless[model] = managed


def find_registered(model: nn.Module) -> ManagedModel | None:
    """What is known of a model; None where it is not managed."""
    found = getattr(vars(model).get(_TABLE), _NAME, None)
    if found is not None:  # the table may be another's, of which this is a shallow copy
        return found.managed if found.model() is model else None
    return _tableless.get(model) if _tableless else None
