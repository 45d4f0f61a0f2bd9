"""The user's own files that a program is made of: the script, what it imports, what that imports.

    train.py
    ├── models                 a package of the user's: all of it, as any part may be imported while it runs
    │   ├── models.net
    │   │   └── torch          installed: a leaf, unless named by --instrument
    │   └── models.loss
    └── torch

The tree is read from the source, without running anything: import statements wherever they stand, and
``importlib.import_module("literal")``. The import hook instruments what really is imported; both ask `Ownership` what
is the user's own. The standard library is left out, and a module that is imported in many places is one node.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gemini.instrument.program.import_names import imported_names
from gemini.instrument.program.module_search import Found, find, submodules
from gemini.instrument.program.ownership import Ownership
from gemini.instrument.text.parser import parser_warnings_muted
from gemini.instrument.text.source_file import SourceFile


@dataclass(eq=False)
class Node:
    """A module of the program. A leaf is an installed one, or one that was not found; it has no source here."""

    module: str
    path: str | None = None
    source: SourceFile | None = None
    is_package: bool = False
    children: list[Node] = field(default_factory=list)
    problem: str = ""

    @property
    def is_leaf(self) -> bool:
        """Whether the tree ends here: not the user's own, or not found."""
        return self.source is None and not self.is_package

    def __repr__(self) -> str:
        return f"Node({self.module!r}, {self.path!r}, {len(self.children)} children)"


class CodeTree:
    """The modules of a program, from `root` down; `nodes` has each of them once, by name, the root first."""

    def __init__(self, root: SourceFile, search: Sequence[str], packages: Iterable[str] = ()) -> None:
        """Read the tree of a program that starts with `root` and imports from the folders `search`."""
        self.ownership = Ownership(packages, main=os.path.abspath(root.path))
        self.search = list(search)
        self.root = Node(root.module, root.path, root, root.is_package)
        self.nodes: dict[str, Node] = {root.module: self.root}
        self._read()

    @classmethod
    def of_script(cls, path: str, packages: Iterable[str] = (), search: Sequence[str] | None = None) -> CodeTree:
        """The tree of the program that ``python path`` runs; a folder stands for its `__main__`."""
        folder = os.path.dirname(os.path.realpath(path))
        if os.path.isdir(path):
            folder, path = path, os.path.join(path, "__main__.py")
        source = SourceFile.read(path, "__main__")
        return cls(source, [folder, *(sys.path if search is None else search)], packages)

    @classmethod
    def of_module(cls, module: str, packages: Iterable[str] = (), search: Sequence[str] | None = None) -> CodeTree:
        """The tree of the program that ``python -m module`` runs, seen from the working directory."""
        folders = [os.getcwd(), *(sys.path if search is None else search)]
        found = find(module, folders)
        if found is not None and found.folders:
            found = find(f"{module}.__main__", folders)
        if found is None or found.path is None or not found.path.endswith(".py"):
            raise ModuleNotFoundError(f"No module named {module}", name=module)
        return cls(SourceFile.read(found.path, found.module), folders, packages)

    def own(self) -> list[SourceFile]:
        """The sources of the user's own modules, the program's first."""
        return [node.source for node in self.nodes.values() if node.source is not None]

    def leaves(self) -> list[str]:
        """The names of the installed packages that the program imports."""
        return sorted(node.module for node in self.nodes.values() if node.is_leaf and not node.problem)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        return "\n".join(self._drawn(self.root, "", "", set()))

    def _read(self) -> None:
        waiting = [self.root]
        if self.root.module.count("."):
            self._reach(self.root, self.root.module.rpartition(".")[0], waiting)
        while waiting:
            node = waiting.pop(0)
            for name in self._wanted(node):
                self._reach(node, name, waiting)

    def _wanted(self, node: Node) -> Iterator[str]:
        """The modules that `node` imports, or as a package may import."""
        if node.source is not None:
            try:
                with parser_warnings_muted():
                    tree: ast.Module = node.source.tree
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                node.problem = f"cannot be parsed: {type(error).__name__}"
                return
            yield from imported_names(tree, _package(node))
        if node.is_package and node.source is not None and node.path is not None and node is not self.root:
            yield from (f"{node.module}.{name}" for name in submodules(os.path.dirname(node.path)))

    def _reach(self, importer: Node, name: str, waiting: list[Node]) -> None:
        """Add the module `name`, and the packages around it, below the module that imports it."""
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names and not self._is_own(parts[0]) and not self.ownership.named(parts[0]):
            return
        parent = importer
        for count in range(1, len(parts) + 1):
            module = ".".join(parts[:count])
            known = self.nodes.get(module)
            if known is None:
                found = find(module, self.search)
                if found is None and count > 1:
                    return  # a name in the package, not a module of it
                known = self._add(module, found)
                waiting.append(known)
            if known is not parent and known not in parent.children:
                parent.children.append(known)
            if known.is_leaf:
                return
            parent = known

    def _is_own(self, module: str) -> bool:
        found = find(module, self.search)
        return found is not None and found.path is not None and self.ownership.owns(found.path, module)

    def _add(self, module: str, found: Found | None) -> Node:
        node = Node(module, found.path if found else None)
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

    def _drawn(self, node: Node, first: str, rest: str, shown: set[Node]) -> Iterator[str]:
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
            yield from self._drawn(child, rest + branch, rest + below, shown)


def _package(node: Node) -> str:
    """The package that relative imports in `node` start from; empty for a script, where they are errors."""
    if node.module == "__main__":
        return ""
    return node.module if node.is_package else node.module.rpartition(".")[0]
