"""Code versions: whether two hosts have the same versions of the software, and the same files of a module's classes.

The versions of Gemini, torch and Python are compared before a worker starts, source files where a module is installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_COMPARED = ("torch", "gemini", "builtins", "__main__")  # by version; classes of the script travel


def versions() -> dict[str, str]:
    """Return the versions that must be equal on both hosts; imports no framework."""
    from gemini import __version__

    python = ".".join(map(str, sys.version_info[:2]))
    return {"gemini": __version__, "torch": version("torch"), "python": python, "byte order": sys.byteorder}


def version_differences(mine: dict[str, str], theirs: dict[str, str], remote: str) -> str:
    """Describe the versions that differ; '' if none do."""
    found = [
        f"{name} {mine.get(name, '—')} (this host) and {theirs.get(name, '—')} ({remote})"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    return "; ".join(found)


def source_hashes(module: nn.Module) -> dict[str, str]:
    """Return the hashes of the files that define the classes of a module and its submodules, by Python module."""
    names = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    found = {name: _hash(name) for name in sorted(names) if name.partition(".")[0] not in _COMPARED}
    return {name: hash_ for name, hash_ in found.items() if hash_}


def find_differences(sources: dict[str, str]) -> str:
    """Return what is missing or different on this host, in words; '' if nothing is."""
    found = []
    for name, theirs in sources.items():
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name} cannot be imported on the worker's host: {error}")
            continue
        if _hash(name) != theirs:
            found.append(f"{name} is another file on the worker's host ({getattr(sys.modules[name], '__file__', '?')})")
    return "; ".join(found)


@functools.lru_cache(maxsize=4096)
def _hash(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""
