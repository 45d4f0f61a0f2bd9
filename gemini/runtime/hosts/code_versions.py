"""Sources: whether two hosts have the same code for the classes of a module.

The versions of Gemini, torch and Python are compared when hosts meet; here come the files of everything else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from pathlib import Path

from torch import nn

_COMPARED = ("torch", "gemini", "builtins", "__main__")  # by version; what the program itself defines travels


def source_hashes(module: nn.Module) -> dict[str, str]:
    """The hashes of the files that define the classes of a module's parts, by the names of their Python modules."""
    names = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    found = {name: _hash(name) for name in sorted(names) if name.partition(".")[0] not in _COMPARED}
    return {name: hash_ for name, hash_ in found.items() if hash_}


def find_differences(sources: dict[str, str]) -> str:
    """What is missing or different on this host, in words; '' if nothing is."""
    found = []
    for name, theirs in sources.items():
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name} cannot be imported there: {error}")
            continue
        if _hash(name) != theirs:
            found.append(f"{name} is another file there ({getattr(sys.modules[name], '__file__', '?')})")
    return "; ".join(found)


@functools.lru_cache(maxsize=4096)
def _hash(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""
