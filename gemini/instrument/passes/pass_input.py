"""Input of a pass: one file with its tree, node index and resolved names.

Everything beyond the source is computed on first access and shared by all passes over the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from gemini.instrument.names.framework_names import canonical
from gemini.instrument.names.qualified_names import ModuleLookup, Names
from gemini.instrument.names.tree_index import Index, NodeT
from gemini.instrument.text.source_file import SourceFile


class Unit:
    """A source file with its tree, index and names."""

    def __init__(self, source: SourceFile, modules: ModuleLookup | None = None) -> None:
        self.source = source
        self._modules = modules

    @property
    def text(self) -> str:
        """The source text."""
        return self.source.text

    @property
    def tree(self) -> ast.Module:
        """The syntax tree, read-only."""
        return self.source.tree

    @cached_property
    def index(self) -> Index:
        """Nodes by type and parents."""
        return Index(self.tree)

    @cached_property
    def names(self) -> Names:
        """The resolved names."""
        return Names(
            self.tree,
            module=self.source.module,
            is_package=self.source.is_package,
            modules=self._modules,
            index=self.index,
        )

    def nodes(self, *types: type[NodeT]) -> list[NodeT]:
        """Return all nodes of exactly these types, in tree order within each type."""
        return self.index.nodes(*types)

    def resolve(self, expr: ast.AST) -> str | None:
        """Return the qualified name of a name or attribute chain, or None where it may be another object."""
        return self.names.resolve(expr)

    def resolve_builtin(self, name: str) -> str | None:
        """Return the qualified name of the builtin `name`, or None where something in the file may shadow it."""
        return self.names.builtin(name)

    def calls(self, *qualified: str) -> Iterator[ast.Call]:
        """Yield the calls of these qualified names; ``torch.nn.*`` stands for everything directly in ``torch.nn``."""
        exact = {canonical(name) for name in qualified if not name.endswith(".*")}
        inside = {name[:-2] for name in qualified if name.endswith(".*")}
        for call, name in self.call_names.items():
            if name in exact or (inside and name.rpartition(".")[0] in inside):
                yield call

    def methods(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of methods with these names on any object: ``x.cuda()`` for ``cuda``."""
        wanted = frozenset(names)
        for call in self.nodes(ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr in wanted:
                yield call

    @cached_property
    def call_names(self) -> dict[ast.Call, str]:
        """Every call whose function has a qualified name, with that name."""
        resolve = self.names.resolve
        found: dict[ast.Call, str] = {}
        for call in self.nodes(ast.Call):
            name = resolve(call.func)
            if name is not None:
                found[call] = name
        return found

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around `node`; None for the module."""
        return self.index.parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the parent of `node`, its parent, and so on up to the module."""
        return self.index.ancestors(node)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost statement around `node`, or `node` itself."""
        return self._nearest(node, ast.stmt)

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
        """Return the innermost function around `node`."""
        return self._around(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)  # type: ignore[return-value]

    def class_(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around `node`."""
        return self._around(node, ast.ClassDef)  # type: ignore[return-value]

    def loop(self, node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
        """Return the innermost loop statement around `node` in the same function."""
        for around in self.ancestors(node):
            if isinstance(around, ast.For | ast.AsyncFor | ast.While):
                return around
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                return None
        return None

    def in_fstring(self, node: ast.AST) -> bool:
        """Return whether `node` is inside an f-string."""
        return any(isinstance(around, ast.JoinedStr) for around in self.ancestors(node))

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of `node`, as written."""
        return self.source.segment(node)

    def _nearest(self, node: ast.AST, kind: type[NodeT]) -> NodeT | None:
        if isinstance(node, kind):
            return node
        return next((around for around in self.ancestors(node) if isinstance(around, kind)), None)

    def _around(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        return next((around for around in self.ancestors(node) if isinstance(around, kinds)), None)
