"""Finding the file of a module by its name, without importing it or its parents.

`importlib` finds a submodule only through its imported parent. Here the folders are looked through in the way that
Python's path finder does: a package before a module, extension modules before source, and folders without an
``__init__`` joined into one namespace package where nothing else has the name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, PathFinder
from typing import NamedTuple

_SUFFIXES = (*EXTENSION_SUFFIXES, ".py", ".pyc")


class Found(NamedTuple):
    """Where a module is: its file (None for a namespace package) and, of a package, where its submodules are."""

    module: str
    path: str | None
    folders: tuple[str, ...] = ()


def find(module: str, search: Sequence[str]) -> Found | None:
    """The module named `module`, looked for in the folders `search`; None where there is none."""
    folders: Sequence[str] = search
    found: Found | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = _in_folders(name, folders) or (_by_other_finders(name) if count == 1 else None)
        if found is None:
            return None
        folders = found.folders
    return found


def _in_folders(module: str, folders: Sequence[str]) -> Found | None:
    portions = []
    for folder in folders:
        base = os.path.join(folder or os.getcwd(), module.rpartition(".")[2])
        for suffix in _SUFFIXES:
            path = os.path.join(base, "__init__" + suffix)
            if os.path.isfile(path):
                return Found(module, path, (base,))
        for suffix in _SUFFIXES:
            if os.path.isfile(base + suffix):
                return Found(module, base + suffix)
        if os.path.isdir(base):
            portions.append(base)
    return Found(module, None, tuple(portions)) if portions else None


def _by_other_finders(module: str) -> Found | None:
    """Ask the finders that editable installs bring."""
    for finder in sys.meta_path:
        if finder in (BuiltinImporter, FrozenImporter, PathFinder):
            continue
        try:
            spec = finder.find_spec(module, None)
        except Exception:  # a stranger's finder; what it cannot find here, it may find when the program runs
            continue
        if spec is not None:
            path = spec.origin if spec.has_location else None
            return Found(module, path, tuple(spec.submodule_search_locations or ()))
    return None


def submodules(folder: str) -> Iterator[str]:
    """The names of the modules and packages in a package's folder, sorted."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in entries:
        name, suffix = os.path.splitext(entry)
        if suffix == ".py" and name.isidentifier() and name != "__init__":
            yield name
        elif entry.isidentifier() and os.path.isfile(os.path.join(folder, entry, "__init__.py")):
            yield entry
