"""Lazy names: modules and attributes of TensorFlow that are imported on first use.

No module of Gemini loads TensorFlow when it is imported. A module of names gives its table to `lazy_names`:

    __getattr__ = lazy_names("tf.contrib.rnn", {"LSTMCell": "tf_keras.layers:LSTMCell"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

LEGACY = "tf_keras.api._v1.keras"
"""Keras 2 in the spelling of TensorFlow 1; Keras 3 has no graphs with sessions."""


class LazyModule:
    """A module that is imported when an attribute is first read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = load(self._name)
        return getattr(self._module, name)


tf: Any = LazyModule("tensorflow.compat.v1")
"""What the modules of this package use as `tf`."""


def load(target: str) -> Any:
    """Import `module` or `module:attribute`; a missing Keras 2 is an error with its remedy."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "tf_keras":
            raise
        raise ModuleNotFoundError(
            "TensorFlow 1's layers and cells are those of Keras 2, which is not installed\n    → pip install tf_keras",
            name=error.name,
        ) from None
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


class LayeredNames(ModuleType):
    """A module whose names come from a table first, then from another module."""

    def __init__(self, title: str, own: Mapping[str, str], base: str) -> None:
        super().__init__(title)
        self._own, self._base = own, base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = load(self._own[name]) if name in self._own else getattr(load(self._base), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self._own, *dir(load(self._base))})


def lazy_names(title: str, own: Mapping[str, str], bases: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module: names by `own`, then those of the modules `bases`; other names raise."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in own:
            return load(own[name])
        for base in bases:
            module = load(base)
            if hasattr(module, name):
                return getattr(module, name)
        known = f"it has {', '.join(sorted(own))}; " if own else ""
        raise AttributeError(
            f"{title}.{name} is not in Gemini's compatibility layer for TensorFlow 1\n"
            f"    → {known}write this part with tf.compat.v1"
        )

    return __getattr__
