"""Code tree: the user's files of a program, from the script through its imports.

    train.py
    ├── models                 a user package: all of it, as any module may be imported at run time
    │   ├── models.net
    │   │   └── torch          installed: a leaf, unless named by --instrument
    │   └── models.loss
    └── torch

The tree is read from the source, without running it: import statements at any depth, and
``importlib.import_module("literal")``. The import hook instruments the modules that are really imported; both use
`Ownership`. The standard library is omitted, and a module that is imported in many places is one node.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gemini.instrument.program.import_names import find_imported_names
from gemini.instrument.program.module_search import ModuleLocation, find_module, list_submodules
from gemini.instrument.program.ownership import Ownership
from gemini.instrument.text.parser import mute_parser_warnings
from gemini.instrument.text.source_file import SourceFile


@dataclass(eq=False)
class CodeNode:
    """A module of the program. A leaf is installed or was not found; it has no source."""

    module: str
    path: str | None = None
    source: SourceFile | None = None
    is_package: bool = False
    children: list[CodeNode] = field(default_factory=list)
    problem: str = ""

    @property
    def is_leaf(self) -> bool:
        """Whether the module is not the user's, or was not found."""
        return self.source is None and not self.is_package

    def __repr__(self) -> str:
        return f"Node({self.module!r}, {self.path!r}, {len(self.children)} children)"


class CodeTree:
    """The modules of a program, from `root` down; `nodes` has each of them once, by name, the root first."""

    def __init__(self, root: SourceFile, search: Sequence[str], packages: Iterable[str] = ()) -> None:
        """Read the tree of a program that starts with `root` and imports from the folders `search`."""
        self.ownership = Ownership(packages, main=os.path.abspath(root.path))
        self.search = list(search)
        self.root = CodeNode(root.module, root.path, root, root.is_package)
        self.nodes: dict[str, CodeNode] = {root.module: self.root}
        self._read_tree()

    @classmethod
    def of_script(cls, path: str, packages: Iterable[str] = (), search: Sequence[str] | None = None) -> CodeTree:
        """Return the tree of the program that ``python path`` runs; a folder means its `__main__`."""
        folder = os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path):
            folder, path = path, os.path.join(path, "__main__.py")
        source = SourceFile.read(path, "__main__")
        return cls(source, [folder, *(sys.path if search is None else search)], packages)

    @classmethod
    def of_module(cls, module: str, packages: Iterable[str] = (), search: Sequence[str] | None = None) -> CodeTree:
        """Return the tree of the program that ``python -m module`` runs in the working directory."""
        folders = [os.getcwd(), *(sys.path if search is None else search)]
        found = find_module(module, folders)
        if found is not None and found.folders:
            found = find_module(f"{module}.__main__", folders)
        if found is None or found.path is None or not found.path.endswith(".py"):
            raise ModuleNotFoundError(f"No module named {module}", name=module)
        return cls(SourceFile.read(found.path, found.module), folders, packages)

    def own(self) -> list[SourceFile]:
        """Return the sources of the user's modules, the main program first."""
        return [node.source for node in self.nodes.values() if node.source is not None]

    def leaves(self) -> list[str]:
        """Return the names of the installed packages that the program imports."""
        return sorted(node.module for node in self.nodes.values() if node.is_leaf and not node.problem)

    def __iter__(self) -> Iterator[CodeNode]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        return "\n".join(self._draw(self.root, "", "", set()))

    def _read_tree(self) -> None:
        waiting = [self.root]
        if self.root.module.count("."):
            self._add_import(self.root, self.root.module.rpartition(".")[0], waiting)
        while waiting:
            node = waiting.pop(0)
            for name in self._imported_modules(node):
                self._add_import(node, name, waiting)

    def _imported_modules(self, node: CodeNode) -> Iterator[str]:
        """Yield the modules that `node` imports, or may import as a package."""
        if node.source is not None:
            try:
                with mute_parser_warnings():
                    tree: ast.Module = node.source.tree
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                node.problem = f"cannot be parsed: {type(error).__name__}"
                return
            yield from find_imported_names(tree, _package(node))
        if node.is_package and node.source is not None and node.path is not None and node is not self.root:
            yield from (f"{node.module}.{name}" for name in list_submodules(os.path.dirname(node.path)))

    def _add_import(self, importer: CodeNode, name: str, waiting: list[CodeNode]) -> None:
        """Add the module `name`, and the packages around it, below the module that imports it."""
        parts = name.split(".")
        if (
            parts[0] in sys.stdlib_module_names
            and not self._is_own(parts[0])
            and not self.ownership.is_requested(parts[0])
        ):
            return
        parent = importer
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            known = self.nodes.get(module)
            if known is None:
                found = find_module(module, self.search)
                if found is None and count > 1:
                    return  # an attribute of the package, not a module
                known = self._add(module, found)
                waiting.append(known)
            if known is not parent and known not in parent.children:
                parent.children.append(known)
            if known.is_leaf:
                return
            parent = known

    def _is_own(self, module: str) -> bool:
        found = find_module(module, self.search)
        return found is not None and found.path is not None and self.ownership.owns(found.path, module)

    def _add(self, module: str, found: ModuleLocation | None) -> CodeNode:
        node = CodeNode(module, found.path if found else None)
        self.nodes[module] = node
        if found is None:
            node.problem = "not found"
        elif found.path is None:  # a namespace package: no file of its own
            node.is_package = any(self.ownership.owns_folder(folder) for folder in found.folders)
        elif self.ownership.owns(found.path, module) and found.path.endswith(".py"):
            node.is_package = bool(found.folders)
            try:
                node.source = SourceFile.read(found.path, module)
            except OSError as error:
                node.problem = f"cannot be read: {error.strerror}"
        return node

    def _draw(self, node: CodeNode, first: str, rest: str, shown: set[CodeNode]) -> Iterator[str]:
        note = node.problem or ("installed" if node.is_leaf else "")
        label = os.path.basename(node.path or "") if node is self.root and node.module == "__main__" else node.module
        again = node in shown and bool(node.children)
        yield f"{first}{label}{f'  ({note})' if note else ''}{'  …' if again else ''}"
        if again:
            return
        shown.add(node)
        for at, child in enumerate(node.children, 1):
            last = at == len(node.children)
            branch, below = ("└── ", "    ") if last else ("├── ", "│   ")
            yield from self._draw(child, rest + branch, rest + below, shown)


def _package(node: CodeNode) -> str:
    """Return the package that relative imports in `node` start from; empty for a script, where they are errors."""
    if node.module == "__main__":
        return ""
    return node.module if node.is_package else node.module.rpartition(".")[0]
