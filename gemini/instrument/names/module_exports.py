"""Exports of other modules, read from their source without importing them.

A script's ``from blocks import *`` or ``import blocks; blocks.nn.Linear`` is followed into ``blocks.py`` if that is a
user file. Of installed modules only the names of a star import are read.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from gemini.instrument.names.qualified_names import ModuleLookup, ModuleNames, Names
from gemini.instrument.program.ownership import Ownership
from gemini.instrument.text.source_file import SourceFile


class ModuleExports:
    """A `ModuleLookup` over search folders: the user's files, and the star exports of installed modules."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._ownership = Ownership()
        self._known: dict[tuple[str, str], ModuleNames | None] = {}

    def beside(self, source: SourceFile) -> _Beside:
        """Return the lookup for `source`, which searches the folder of its top-level module first."""
        return _Beside(self, _root(source))

    def find(self, module: str, root: str) -> ModuleNames | None:
        """Return the names of `module` for a program in the folder `root`."""
        key = (root, module)
        if key not in self._known:
            self._known[key] = None  # ends the recursion of modules that import each other
            self._known[key] = self._find(module, root)
        return self._known[key]

    def _find(self, module: str, root: str) -> ModuleNames | None:
        path = self._locate(module, root)
        if path is None:
            return _Installed(module, None)
        if not self._ownership.owns(path, module):
            return _Installed(module, path)
        return _read_names(path, module, self.beside(SourceFile(path, b"", module)))

    def _locate(self, module: str, root: str) -> str | None:
        relative = module.replace(".", os.sep)
        for folder in (root, *(sys.path if self._path is None else self._path)):
            base = os.path.join(folder or os.curdir, relative)
            for path in (os.path.join(base, "__init__.py"), f"{base}.py"):
                if os.path.isfile(path):
                    return path
        return None


class _Beside:
    """`ModuleExports` as searched from one file of a program."""

    def __init__(self, modules: ModuleExports, root: str) -> None:
        self._modules = modules
        self._root = root

    def __call__(self, module: str) -> ModuleNames | None:
        return self._modules.find(module, self._root)


class _Installed:
    """An installed module: only the names of a star import, found on demand."""

    def __init__(self, module: str, path: str | None) -> None:
        self._module = module
        self._path = path

    def export(self, _name: str) -> str | None:
        return None

    def star(self) -> frozenset[str] | None:
        loaded = sys.modules.get(self._module)
        if loaded is None and self._path is None and self._module in sys.stdlib_module_names:
            loaded = importlib.import_module(self._module)  # built into Python, such as math
        if loaded is not None:
            public = [name for name in vars(loaded) if not name.startswith("_")]
            return frozenset(getattr(loaded, "__all__", public))
        names = _read_names(self._path, self._module, lambda _: None) if self._path else None
        return names.star() if names is not None else None


def _read_names(path: str, module: str, lookup: ModuleLookup) -> Names | None:
    try:
        source = SourceFile.read(path, module)
        tree = source.tree
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return Names(tree, module, is_package=source.is_package, modules=lookup)


def _root(source: SourceFile) -> str:
    """Return the folder that the top-level module or package of `source` lies in."""
    folder = os.path.dirname(os.path.abspath(source.path))
    parts = 0 if source.module in ("", "__main__") else source.module.count(".") + source.is_package
    for _ in range(parts):
        folder = os.path.dirname(folder)
    return folder
