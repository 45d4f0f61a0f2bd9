"""Tree index: nodes by type and parents, from one walk over a syntax tree.

`Index` visits every node once, with an explicit stack, and records the nodes of each type and the parent of each node.
All passes over one file share it. Context and operator nodes (`Load`, `Add`, …) are omitted: the parser uses a
single object for all of them, so they have no unique parent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

NodeT = TypeVar("NodeT", bound=ast.AST)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LoopNode = ast.For | ast.AsyncFor | ast.While

# Fields without nodes, for every class that has them.
_PLAIN_FIELDS = (
    "ctx op ops kind type_comment type_ignores id attr arg name asname module level simple conversion is_async tag "
    "rest kwd_attrs n s"
)
_PLAIN = frozenset(_PLAIN_FIELDS.split())
_PLAIN_OF: dict[type[ast.AST], frozenset[str]] = {
    ast.Global: frozenset(["names"]),
    ast.Nonlocal: frozenset(["names"]),
    ast.Constant: frozenset(["value"]),
    ast.MatchSingleton: frozenset(["value"]),
}


def _child_fields(cls: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of `cls` that hold nodes, last first: the stack of the walk reverses them."""
    skip = _PLAIN | _PLAIN_OF.get(cls, frozenset())
    if cls.__name__ == "TypeAlias":  # Python 3.12; its name is a node
        skip = skip - {"name"}
    return tuple(field for field in reversed(cls._fields) if field not in skip)


def _all_classes(cls: type[ast.AST]) -> Iterator[type[ast.AST]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _all_classes(sub)


CHILD_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {cls: _child_fields(cls) for cls in _all_classes(ast.AST)}


class Index:
    """The nodes of a tree by type, in tree order, and the parent of each."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = {}
        self._walk()

    def _walk(self) -> None:
        parents, by_type, fields = self.parents, self._by_type, CHILD_FIELDS
        stack: list[ast.AST] = [self.tree]
        pop, push = stack.pop, stack.append
        while stack:
            node = pop()
            cls = node.__class__
            try:
                by_type[cls].append(node)
            except KeyError:
                by_type[cls] = [node]
            for name in fields[cls]:
                value = getattr(node, name)
                if value.__class__ is list:
                    for child in reversed(value):
                        if child is not None:  # the key of ``**other`` in a dict
                            parents[child] = node
                            push(child)
                elif value is not None:
                    parents[value] = node
                    push(value)

    def nodes(self, *types: type[NodeT]) -> list[NodeT]:
        """Return all nodes of exactly these types, in tree order within each type."""
        if len(types) == 1:
            return self._by_type.get(types[0], [])  # type: ignore[return-value]
        return [node for one in types for node in self._by_type.get(one, ())]  # type: ignore[misc]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parent of `node`, its parent, and so on up to the module."""
        parents = self.parents
        while (parent := parents.get(node)) is not None:
            yield parent
            node = parent
