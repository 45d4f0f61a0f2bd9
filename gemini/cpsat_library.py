"""CP-SAT library: OR-tools' solver, an optional dependency, imported with its own symbols.

TensorFlow makes the symbols of its copy of abseil global. OR-tools has another copy: if its symbols were bound to those
of TensorFlow, the solver would crash. It is therefore loaded so that its own libraries come first.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import Any

_MODULE = "ortools.sat.python.cp_model"


def has_cpsat() -> bool:
    """Return whether OR-tools is installed, without importing it."""
    try:
        return find_spec("ortools") is not None
    except (ImportError, ValueError):
        return False


def import_cpsat() -> Any:
    """Import and return the module of the solver; raises ImportError where OR-tools is not installed."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        return importlib.import_module(_MODULE)
    finally:
        sys.setdlopenflags(flags)
