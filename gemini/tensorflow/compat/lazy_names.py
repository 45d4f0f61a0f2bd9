"""Lazy names: modules and attributes of TensorFlow that are imported on first use.

No module of Gemini loads TensorFlow when it is imported. A module of names is a table:

    NameTable("tf.contrib.rnn", {"LSTMCell": "tf_keras.layers:LSTMCell"})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

LEGACY = "tf_keras.api._v1.keras"
"""Keras 2 in the spelling of TensorFlow 1; Keras 3 has no graphs with sessions."""


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


class NameTable(ModuleType):
    """A module whose names come from a table first, then from other modules; each is kept once it is found."""

    def __init__(self, title: str, own: Mapping[str, str], bases: Sequence[str] = ()) -> None:
        super().__init__(title)
        self._own, self._bases = own, bases

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._find(name)
        setattr(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        if name in self._own:
            return load(self._own[name])
        for base in map(load, self._bases):
            if hasattr(base, name):
                return getattr(base, name)
        known = f"it has {', '.join(sorted(self._own))}; " if self._own else ""
        raise AttributeError(
            f"{self.__name__}.{name} is not in Gemini's compatibility layer for TensorFlow 1\n"
            f"    → {known}write this part with tf.compat.v1"
        )

    def __dir__(self) -> list[str]:
        return sorted({*self._own, *(dir(load(self._bases[0])) if self._bases else ())})


tf: Any = NameTable("tf", {}, ("tensorflow.compat.v1",))
"""What the modules of this package use as `tf`."""
