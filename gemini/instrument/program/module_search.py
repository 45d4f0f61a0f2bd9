"""Module search: the file of a module by its name, without importing it or its parents.

`importlib` finds a submodule only through its imported parent. This search follows the rules of Python's path finder: a
package before a module, extension modules before source, and folders without an ``__init__`` joined into one namespace
package where no other module has the name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, PathFinder
from typing import NamedTuple

_SUFFIXES = (*EXTENSION_SUFFIXES, ".py", ".pyc")


class ModuleLocation(NamedTuple):
    """The location of a module: its file (None for a namespace package) and, of a package, its folders."""

    module: str
    path: str | None
    folders: tuple[str, ...] = ()


def find_module(module: str, search: Sequence[str]) -> ModuleLocation | None:
    """Return the module named `module`, from the folders `search`; None if not found."""
    folders: Sequence[str] = search
    found: ModuleLocation | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = _in_folders(name, folders) or (_by_other_finders(name) if count == 1 else None)
        if found is None:
            return None
        folders = found.folders
    return found


def _in_folders(module: str, folders: Sequence[str]) -> ModuleLocation | None:
    portions = []
    for folder in folders:
        base = os.path.join(folder or os.getcwd(), module.rpartition(".")[2])
        for suffix in _SUFFIXES:
            path = os.path.join(base, "__init__" + suffix)
            if os.path.isfile(path):
                return ModuleLocation(module, path, (base,))
        for suffix in _SUFFIXES:
            if os.path.isfile(base + suffix):
                return ModuleLocation(module, base + suffix)
        if os.path.isdir(base):
            portions.append(base)
    return ModuleLocation(module, None, tuple(portions)) if portions else None


def _by_other_finders(module: str) -> ModuleLocation | None:
    """Search by the finders of editable installs."""
    for finder in sys.meta_path:
        if finder in (BuiltinImporter, FrozenImporter, PathFinder):
            continue
        try:
            spec = finder.find_spec(module, None)
        except Exception:  # a finder of another package, which may work when the program runs
            continue
        if spec is not None:
            path = spec.origin if spec.has_location else None
            return ModuleLocation(module, path, tuple(spec.submodule_search_locations or ()))
    return None


def list_submodules(folder: str) -> Iterator[str]:
    """Yield the names of the modules and packages in a package's folder, sorted."""
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
