"""What a pass sees of one file.

A `Unit` joins the source, the tree, the shared index of nodes and the resolved names. Everything beyond the source is
made when first asked for and then shared by all passes that look at the file.
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
        """The syntax tree; not to be changed."""
        return self.source.tree

    @cached_property
    def index(self) -> Index:
        """Nodes by type and parents."""
        return Index(self.tree)

    @cached_property
    def names(self) -> Names:
        """What names mean."""
        return Names(
            self.tree,
            module=self.source.module,
            is_package=self.source.is_package,
            modules=self._modules,
            index=self.index,
        )

    def nodes(self, *types: type[NodeT]) -> list[NodeT]:
        """All nodes of exactly these types, in tree order within each type."""
        return self.index.nodes(*types)

    def resolve(self, expr: ast.AST) -> str | None:
        """The qualified name of a name or attribute chain, or None where it may mean something else."""
        return self.names.resolve(expr)

    def resolve_builtin(self, name: str) -> str | None:
        """The qualified name of the builtin `name`, or None where something in the file may shadow it."""
        return self.names.builtin(name)

    def calls(self, *qualified: str) -> Iterator[ast.Call]:
        """The calls of these qualified names; ``torch.nn.*`` stands for everything directly in ``torch.nn``."""
        exact = {canonical(name) for name in qualified if not name.endswith(".*")}
        inside = {name[:-2] for name in qualified if name.endswith(".*")}
        for call, name in self.call_names.items():
            if name in exact or (inside and name.rpartition(".")[0] in inside):
                yield call

    def methods(self, *names: str) -> Iterator[ast.Call]:
        """The calls of a method or attribute spelled so on any object: ``x.cuda()`` for ``cuda``."""
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
        """The node around `node`; None for the module."""
        return self.index.parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The parent of `node`, its parent, and so on up to the module."""
        return self.index.ancestors(node)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement that holds `node` (itself, if it is one)."""
        return self._nearest(node, ast.stmt)

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
        """The innermost function that `node` is written in."""
        return self._around(node, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)  # type: ignore[return-value]

    def class_(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class that `node` is written in."""
        return self._around(node, ast.ClassDef)  # type: ignore[return-value]

    def loop(self, node: ast.AST) -> ast.For | ast.AsyncFor | ast.While | None:
        """The innermost loop statement around `node` in the same function."""
        for around in self.ancestors(node):
            if isinstance(around, ast.For | ast.AsyncFor | ast.While):
                return around
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                return None
        return None

    def in_fstring(self, node: ast.AST) -> bool:
        """Whether `node` is written inside an f-string."""
        return any(isinstance(around, ast.JoinedStr) for around in self.ancestors(node))

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The text of `node`, as written."""
        return self.source.segment(node)

    def _nearest(self, node: ast.AST, kind: type[NodeT]) -> NodeT | None:
        if isinstance(node, kind):
            return node
        return next((around for around in self.ancestors(node) if isinstance(around, kind)), None)

    def _around(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST | None:
        return next((around for around in self.ancestors(node) if isinstance(around, kinds)), None)
