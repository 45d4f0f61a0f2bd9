"""Outline of a syntax tree.

Every statement is an `OutlineItem`, with its node type and its headline (`For  images, labels in loader`). Expressions
that are recognised, or that a pass changed, are items beside the item they belong to; the rest of an expression is
text. `…` in a text stands for an item shown beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from gemini.instrument.output.node_headline import headline
from gemini.instrument.passes.pass_input import Unit

Place = tuple[int, int, int, int]  # line, column, end line, end column

_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_ROLES = {"orelse": "else", "finalbody": "finally"}
# Expressions that are items if they contain a recognised node; other expressions never are.
_SHOWN = (
    ast.Call, ast.Lambda, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr,
)  # fmt: skip


@dataclass
class OutlineItem:
    """One node of the outline."""

    type: str
    text: str
    size: int  # AST nodes in it, including itself
    kind: str = ""  # of a finding
    changed: bool = False
    line: int = 0  # in the file
    parts: list[OutlineItem] = field(default_factory=list)  # expressions, shown beside
    body: list[OutlineItem] = field(default_factory=list)  # statements, shown below

    def walk(self) -> Iterator[OutlineItem]:
        """Yield the item and all below it."""
        yield self
        for child in (*self.parts, *self.body):
            yield from child.walk()

    @property
    def count(self) -> int:
        """The number of items, including all below."""
        return sum(1 for _ in self.walk())

    @property
    def matters(self) -> bool:
        """Whether the item, or one below it, is recognised or changed."""
        return any(item.kind or item.changed for item in self.walk())


def outline(
    unit: Unit,
    kinds: Mapping[tuple[Place, bool], str],
    changed: Set[ast.AST] = frozenset(),
    *,
    title: str,
    full: bool = False,
) -> OutlineItem:
    """Return the outline of a file.

    `kinds` maps the place of a recognised node, and whether it is a statement, to its kind; `changed` are the nodes
    that a pass added. With `full`, every expression is an item.
    """
    return _Outliner(unit, kinds, changed, full).module(title)


class _Outliner:
    def __init__(self, unit: Unit, kinds: Mapping[tuple[Place, bool], str], changed: Set[ast.AST], full: bool) -> None:
        self.unit = unit
        self.kinds = kinds
        self.changed = changed
        self.full = full
        self.notable = self._notable_nodes()

    def module(self, title: str) -> OutlineItem:
        tree = self.unit.tree
        body = [self.statement(node) for node in tree.body]
        return OutlineItem("Module", title, _size(tree), body=body)

    def statement(self, node: ast.AST) -> OutlineItem:
        if isinstance(node, ast.Expr):
            return self._expression_statement(node)
        parts = [self.expression(part) for part in self._parts(node)]
        body: list[OutlineItem] = []
        for name in _BLOCKS:
            inner: list[ast.AST] = getattr(node, name, None) or []
            items = [self.statement(each) for each in inner] if isinstance(inner, list) else []
            if items and name in _ROLES:
                items = [OutlineItem(_ROLES[name], "", sum(item.size for item in items), body=items)]
            body.extend(items)
        text = self._text(node)
        item = OutlineItem(type(node).__name__, text, _size(node), self._kind(node), parts=parts, body=body)
        item.changed = self._is_changed(node, [*self._parts(node), *_inner_statements(node)])
        item.line = getattr(node, "lineno", 0)
        return item

    def expression(self, node: ast.expr) -> OutlineItem:
        inner = list(self._parts(node))
        item = OutlineItem(type(node).__name__, self._text(node), _size(node), self._kind(node))
        item.parts = [self.expression(part) for part in inner]
        item.changed = self._is_changed(node, inner)
        item.line = node.lineno
        return item

    def _expression_statement(self, node: ast.Expr) -> OutlineItem:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = " ".join(node.value.value.split())
            return OutlineItem("Docstring", text, 2)
        return self.expression(node.value)  # shown as its expression

    def _parts(self, node: ast.AST) -> list[ast.expr]:
        """Return the outermost expressions below `node` that are items."""
        found: list[ast.expr] = []
        waiting = [child for child in _children(node) if not isinstance(child, ast.stmt)]
        while waiting:
            child = waiting.pop(0)
            if isinstance(child, ast.expr) and self._is_shown(child):
                found.append(child)
            elif not isinstance(child, (ast.ExceptHandler, ast.match_case)):
                waiting = [*_children(child), *waiting]
        return found

    def _is_shown(self, node: ast.expr) -> bool:
        if self.full:
            inside_text = isinstance(self.unit.parent(node), (ast.JoinedStr, ast.FormattedValue))
            return not isinstance(node, (ast.Starred, ast.FormattedValue)) and not (
                inside_text and isinstance(node, (ast.Constant, ast.JoinedStr))
            )
        if node not in self.notable:
            return False
        return isinstance(node, _SHOWN) or bool(self._kind(node))

    def _notable_nodes(self) -> set[ast.AST]:
        """Return the recognised and added nodes, and their ancestors."""
        notable: set[ast.AST] = set()
        for node in ast.walk(self.unit.tree):
            if self._kind(node) or (isinstance(node, ast.Call) and node in self.changed):
                notable.add(node)
                notable.update(self.unit.ancestors(node))
        return notable

    def _is_changed(self, node: ast.AST, inner: Iterable[ast.AST]) -> bool:
        """Return whether a changed node lies in `node`, outside of the items in it."""
        if not self.changed:
            return False
        waiting, apart = [node], set(inner)
        while waiting:
            each = waiting.pop()
            if each in self.changed:
                return True
            waiting.extend(child for child in ast.iter_child_nodes(each) if child not in apart)
        return False

    def _kind(self, node: ast.AST) -> str:
        if not isinstance(node, (ast.expr, ast.stmt)) or node.end_lineno is None or node.end_col_offset is None:
            return ""
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return self.kinds.get((place, isinstance(node, ast.stmt)), "")

    def _text(self, node: ast.AST) -> str:
        """Return the headline of a node: items inside as `…`, the function of a call by its qualified name."""
        parts = {id(part) for part in self._parts(node)}
        name = self._function_name(node)
        if not parts and name is None:
            return _without_type(node, headline(node, self.unit.source))
        return _without_type(node, headline(_rebuild(node, parts, name)))

    def _function_name(self, node: ast.AST) -> str | None:
        if not isinstance(node, ast.Call) or self.full:
            return None
        name = self.unit.resolve(node.func)
        if name is None or name.startswith(("builtins.", "gemini.managed.")):
            return None
        return name.removeprefix("__main__.")


def _rebuild(node: ast.AST, parts: set[int], function: str | None = None) -> ast.AST:
    """Return a copy of `node` with `parts` as `…` and without blocks."""
    fields: dict[str, object] = {}
    for name, value in ast.iter_fields(node):
        if name in _BLOCKS and isinstance(value, list):
            fields[name] = [ast.Pass()]
        elif name == "func" and function is not None:
            fields[name] = ast.Name(function, ast.Load())
        elif isinstance(value, list):
            fields[name] = [_elide(each, parts) for each in value]
        else:
            fields[name] = _elide(value, parts)
    return ast.copy_location(type(node)(**fields), node)


def _elide(value: object, parts: set[int]) -> object:
    if id(value) in parts:
        return ast.Name("…", ast.Load())
    return _rebuild(value, parts) if isinstance(value, ast.AST) else value


def _without_type(node: ast.AST, text: str) -> str:
    """Return the text without the keyword that the node type implies."""
    for word in _WORDS.get(type(node).__name__, ()):
        if text == word or text.startswith(f"{word} "):
            return text[len(word) :].lstrip()
    return text


_WORDS = {
    "FunctionDef": ("def",), "AsyncFunctionDef": ("async def",), "ClassDef": ("class",), "For": ("for",),
    "AsyncFor": ("async for",), "While": ("while",), "If": ("if",), "With": ("with",), "AsyncWith": ("async with",),
    "Try": ("try",), "TryStar": ("try (groups)",), "ExceptHandler": ("except",), "Match": ("match",),
    "match_case": ("case",), "Return": ("return",), "Import": ("import",),
    "ImportFrom": ("from",), "Raise": ("raise",), "Assert": ("assert",),
    "Delete": ("del",), "Global": ("global",), "Nonlocal": ("nonlocal",), "Await": ("await",), "Lambda": ("lambda",),
    "Pass": ("pass",), "Break": ("break",), "Continue": ("continue",),
}  # fmt: skip


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in _BLOCKS and isinstance(value, list):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.expr_context, ast.operator)):
                yield child


def _inner_statements(node: ast.AST) -> list[ast.AST]:
    return [each for name in _BLOCKS for each in _as_list(getattr(node, name, None))]


def _as_list(value: object) -> list[ast.AST]:
    return value if isinstance(value, list) else []


def _size(node: ast.AST) -> int:
    return sum(1 for each in ast.walk(node) if not isinstance(each, (ast.expr_context, ast.operator)))
