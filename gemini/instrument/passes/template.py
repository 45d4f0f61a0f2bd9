"""Python expressions with holes: the language of declarative passes.

    torch.nn.Linear($args)      every argument, positional, named, starred
    torch.add($x, $y)           one expression each; the same hole twice must be the same text
    $model.cuda($_)             any object; `$_` is any expression, not retained

A template is Python with ``$`` as a letter of names, so Python's parser reads it and its positions locate faults.
"""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass
from functools import cached_property

from gemini.errors import PatternError
from gemini.instrument.text.lines import Lines, caret

ARGS = "args"
ANYTHING = "_"
_MARK = "ʘ"  # one character that Python reads as a letter
_STRING_OR_HOLE = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\$")


@dataclass(frozen=True)
class Hole:
    """A hole in a template, with the offsets of its text there."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Template:
    """An expression with holes; checked when it is made."""

    text: str
    role: str = "pattern"

    def __post_init__(self) -> None:
        _ = self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Starred | ast.keyword) and hole_name(node.value) == ARGS:
                raise self.fault(
                    node, "$args already stands for starred and named arguments", "write it alone: f($args)"
                )
            if isinstance(node, ast.Call):
                self._check_arguments(node)
        around = {id(arg) for node in ast.walk(self.tree) if isinstance(node, ast.Call) for arg in node.args}
        for node in ast.walk(self.tree):
            if hole_name(node) == ARGS and id(node) not in around:
                raise self.fault(node, "$args stands for the arguments of a call", "write it in a call, as in f($args)")

    def _check_arguments(self, call: ast.Call) -> None:
        for argument in call.args[:-1]:
            if hole_name(argument) == ARGS:
                raise self.fault(argument, "$args takes all remaining arguments", "write it last")

    @cached_property
    def tree(self) -> ast.expr:
        """The expression, with holes as names."""
        try:
            return ast.parse(self._source, mode="eval").body
        except SyntaxError as error:
            column = (error.offset or 1) - 1
            if error.lineno not in (None, 1):
                column += sum(map(len, self.text.splitlines(keepends=True)[: (error.lineno or 1) - 1]))
            raise self._error(error.msg, min(column, len(self.text)), "write one Python expression") from None

    @cached_property
    def _source(self) -> str:
        def marked(found: re.Match[str]) -> str:
            if found[0] != "$":
                return found[0]
            if not re.match(r"[^\W\d]", self.text[found.end() : found.end() + 1]):
                raise self._error("a hole has no name", found.start(), "write $name, $args or $_")
            return _MARK

        if not self.text.strip():
            raise PatternError(
                f"the {self.role} is empty\n    → write one Python expression, such as torch.device($args)"
            )
        return _STRING_OR_HOLE.sub(marked, self.text)

    @cached_property
    def holes(self) -> tuple[Hole, ...]:
        """The holes, as they are written."""
        found = [node for node in ast.walk(self.tree) if hole_name(node) is not None]
        made = [Hole(hole_name(node) or "", *self.span(node)) for node in found]
        return tuple(sorted(made, key=lambda hole: hole.start))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of `node` in the template's text."""
        place = vars(node)
        start = self._lines.offset(place["lineno"], place["col_offset"])
        return start, self._lines.offset(place["end_lineno"], place["end_col_offset"])

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self._source)

    def fault(self, node: ast.AST, what: str, remedy: str) -> PatternError:
        """Return an error that points at `node`."""
        start, end = self.span(node)
        return self._error(what, start, remedy, end - start)

    def _error(self, what: str, column: int, remedy: str, width: int = 1) -> PatternError:
        line = self.text.replace("\n", " ")
        return PatternError(f"the {self.role} cannot be used: {what}\n{caret(line, column, width)}\n    → {remedy}")


def hole_name(node: ast.AST) -> str | None:
    """Return the name of the hole that `node` is, or None."""
    return node.id[1:] if isinstance(node, ast.Name) and node.id.startswith(_MARK) else None


def qualified_name(node: ast.AST) -> str | None:
    """Return the dotted name of a template's node without holes: a builtin, or a name in a module."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or hole_name(node) is not None:
        return None
    if not parts:
        return f"builtins.{node.id}" if hasattr(builtins, node.id) else node.id
    return ".".join([node.id, *reversed(parts)])


def bound_inside(tree: ast.expr) -> frozenset[str]:
    """Return the names that a template binds: parameters of lambdas, targets of comprehensions."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)})
