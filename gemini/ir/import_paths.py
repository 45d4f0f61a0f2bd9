"""Import paths: importable objects as module and qualified name."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Symbol:
    """The import path of a function, a class or an enumeration member."""

    module: str
    qualname: str

    def resolve(self) -> Any:
        """Import the object."""
        found: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found


def symbol_of(value: Any) -> Symbol | None:
    """Return the import path of a function, class or enumeration member, if it resolves to the same object."""
    if isinstance(value, enum.Enum):
        kind = type(value)
        symbol = Symbol(kind.__module__, f"{kind.__qualname__}.{value.name}")
    else:
        module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not module or not qualname or "<" in qualname:
            return None
        symbol = Symbol(module, qualname)
    try:
        return symbol if symbol.resolve() is value else None
    except (ImportError, AttributeError):
        return None
