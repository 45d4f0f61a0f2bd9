"""Pattern matching: a template against the user's code, by resolved names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemini.instrument.names.framework_names import canonical
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.template import ANYTHING, ARGS, Template, hole_name, qualified_name
from gemini.instrument.text.edits import Span

_BETWEEN = re.compile(r"(?:[\s)\\]|#[^\r\n]*)*")  # after an argument: its closing brackets, blanks and comments


@dataclass(frozen=True)
class Arguments:
    """The arguments matched by `$args`: the text up to the closing bracket, and the same without a last comma."""

    span: Span
    trimmed: Span
    count: int
    is_bare_generator: bool


@dataclass
class Match:
    """A node that matches the pattern, and the content of its holes."""

    node: ast.expr
    expressions: dict[str, ast.expr] = field(default_factory=dict)
    arguments: Arguments | None = None


class Matcher:
    """Finds a pattern in a file."""

    def __init__(self, pattern: Template) -> None:
        self._pattern = pattern.tree
        self._name = qualified_name(pattern.tree)

    def find(self, unit: Unit) -> Iterator[Match]:
        """Yield all matches, outer before inner ones."""
        if self._name is not None:
            candidates: list[ast.expr] = [*unit.nodes(ast.Name), *unit.nodes(ast.Attribute)]
        else:
            candidates = unit.nodes(type(self._pattern))
        for node in candidates:
            match = Match(node)
            if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
                continue
            if self._matches(self._pattern, node, unit, match):
                yield match

    def _matches(self, pattern: object, node: object, unit: Unit, match: Match) -> bool:
        if isinstance(pattern, ast.AST):
            hole = hole_name(pattern)
            if hole is not None:
                return isinstance(node, ast.expr) and self._fill(hole, node, unit, match)
            name = qualified_name(pattern)
            if name is not None:
                return isinstance(node, ast.expr) and unit.resolve(node) == canonical(name)
            if type(pattern) is not type(node):
                return False
            if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
                return self._matches(pattern.func, node.func, unit, match) and self._call(pattern, node, unit, match)
            return all(
                self._matches(getattr(pattern, name), getattr(node, name), unit, match)
                for name in pattern._fields
                if name not in ("ctx", "kind", "type_comment")
            )
        if isinstance(pattern, list) and isinstance(node, list):
            return len(pattern) == len(node) and all(
                self._matches(one, other, unit, match) for one, other in zip(pattern, node)
            )
        return type(pattern) is type(node) and pattern == node

    def _fill(self, hole: str, node: ast.expr, unit: Unit, match: Match) -> bool:
        if isinstance(node, ast.Starred | ast.Slice):
            return False
        if hole == ANYTHING:
            return True
        known = match.expressions.setdefault(hole, node)
        return known is node or unit.segment(known) == unit.segment(node)

    def _call(self, pattern: ast.Call, node: ast.Call, unit: Unit, match: Match) -> bool:
        takes_rest = bool(pattern.args) and hole_name(pattern.args[-1]) == ARGS
        positional = pattern.args[:-1] if takes_rest else pattern.args
        if len(node.args) < len(positional) or (len(node.args) > len(positional) and not takes_rest):
            return False
        if not all(self._matches(one, other, unit, match) for one, other in zip(positional, node.args)):
            return False
        passed = {keyword.arg: keyword for keyword in node.keywords if keyword.arg is not None}
        for keyword in pattern.keywords:
            if keyword.arg not in passed or not self._matches(keyword.value, passed[keyword.arg].value, unit, match):
                return False
        if not takes_rest:
            return len(node.keywords) == len(pattern.keywords)
        # A keyword argument of the pattern in the middle of the rest would leave a gap in its text.
        named = {keyword.arg for keyword in pattern.keywords}
        rest = [keyword for keyword in node.keywords if keyword.arg not in named]
        taken = [*node.args[: len(positional)], *(one for one in node.keywords if one.arg in named)]
        match.arguments = _rest(unit, node, taken, [*node.args[len(positional) :], *rest])
        return match.arguments is not None


def _rest(unit: Unit, call: ast.Call, taken: list[ast.AST], rest: list[ast.AST]) -> Arguments | None:
    """Return the text of the arguments `rest` of `call`; None where `taken` ones lie among them."""
    source = unit.source
    end = source.span(call)[1] - 1
    start = _after(unit.text, source.span(call.func)[1], "(")
    inner = sorted(_offsets(unit, one) for one in rest)
    for first, last in sorted(_offsets(unit, one) for one in taken):
        if inner and first > inner[0][0]:
            if first < inner[-1][0]:
                return None
            end = min(end, _before_comma(unit.text, inner[-1][1]))
        else:
            start = max(start, _after(unit.text, last, ",") if inner else end)
    blanks = re.compile(r"[ \t\f]*").match(unit.text, start) if taken else None
    start = min(blanks.end(), end) if blanks else start
    only = call.args[0] if len(call.args) == 1 and not call.keywords else None
    bare = isinstance(only, ast.GeneratorExp) and source.span(only)[1] == source.span(call)[1]
    trimmed = min(end, _before_comma(unit.text, inner[-1][1], end)) if inner and not bare else end
    begin = source.position(start)
    return Arguments(Span(*begin, *source.position(end)), Span(*begin, *source.position(trimmed)), len(rest), bare)


def _offsets(unit: Unit, node: ast.AST) -> tuple[int, int]:
    return unit.source.span(node)  # type: ignore[arg-type]


def _after(text: str, offset: int, char: str) -> int:
    """Return the offset after the next `char` after an argument or a function that ends at `offset`."""
    found = _BETWEEN.match(text, offset)
    at = found.end() if found else offset
    return at + 1 if text[at : at + 1] == char else at


def _before_comma(text: str, offset: int, otherwise: int | None = None) -> int:
    """Return the offset of the comma after an argument that ends at `offset`; `otherwise` without one."""
    found = _BETWEEN.match(text, offset)
    at = found.end() if found else offset
    if text[at : at + 1] == ",":
        return at
    return offset if otherwise is None else otherwise
