"""Edits inside f-strings and their restrictions.

The f-string ``{x.cuda()=}`` prints the text of its expression, so an edit in it would change the program's output.
Before Python 3.12 an expression in an f-string must not contain the quotes of the string, nor a backslash; and the
parser's positions for it are sometimes wrong. So an edit in an f-string is compared with the text at its position, its
new text gets the quotes that are still free, and an edit that cannot be applied is dropped with a reason instead of
failing the whole pass.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Sequence
from typing import NamedTuple

from gemini.errors import EditError
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.edits import Edit

_STRICT = sys.version_info < (3, 12)
_SHOWN = re.compile(r"[\s)]*=")  # an expression has ended, so this is no comparison
_PLAIN_STRING = re.compile(r'"([^"\'\\\n]*)"|\'([^"\'\\\n]*)\'')


class FittedEdits(NamedTuple):
    """The edits that can be applied, and the dropped ones with the reason."""

    edits: list[Edit]
    left_out: list[tuple[Edit, str]]


def fit_to_fstrings(unit: Unit, edits: Sequence[Edit], *, strict: bool = _STRICT) -> FittedEdits:
    """Adapt `edits` to the f-strings around them: by this Python's rules, or if `strict` by those before 3.12."""
    fitted = FittedEdits([], [])
    if not unit.nodes(ast.JoinedStr):
        return FittedEdits(list(edits), [])
    for edit in edits:
        strings = _strings_around(unit, edit)
        if strings and _is_shown(unit, edit):
            fitted.left_out.append((edit, "the f-string shows the text of this expression ({…=})"))
            continue
        if not strings or not strict:
            fitted.edits.append(edit)
            continue
        made, reason = _fit(unit, edit, strings)
        if made is not None:
            fitted.edits.append(made)
        else:
            fitted.left_out.append((edit, reason))
    return fitted


def _strings_around(unit: Unit, edit: Edit) -> list[ast.JoinedStr]:
    """Return the f-strings around the edited node, innermost first."""
    if edit.node is None:
        return []
    if isinstance(edit.node, ast.Constant) and isinstance(unit.parent(edit.node), ast.JoinedStr):
        raise EditError(
            f"{unit.source.path}: {edit.describe()} edits the plain text of an f-string, which is not an expression\n"
            "    → edit the whole f-string (JoinedStr), or an expression in it",
            line=edit.span.line,
            column=edit.span.column,
        )
    around = [node for node in unit.ancestors(edit.node) if isinstance(node, ast.JoinedStr)]
    # A format specification ({x:>{width}}) is a JoinedStr too, written inside the quotes of the one around it.
    return [node for node in around if getattr(unit.parent(node), "format_spec", None) is not node]


def _is_shown(unit: Unit, edit: Edit) -> bool:
    """Return whether the f-string prints the text of an expression around the edited node: ``{expression=}``."""
    below: ast.AST | None = edit.node
    while below is not None:
        around = unit.parent(below)
        if isinstance(around, ast.FormattedValue) and below is around.value:
            end = unit.source.span(around.value)[1]
            if _SHOWN.match(unit.text, end):
                return True
        below = around
    return False


def _fit(unit: Unit, edit: Edit, strings: list[ast.JoinedStr]) -> tuple[Edit | None, str]:
    node = edit.node
    if not isinstance(node, ast.expr) or not _is_at(unit, node):
        return None, "its position in the f-string is not known exactly before Python 3.12"
    quotes = {quote for string in strings for quote in _quotes(unit, string, node)}
    free = [quote for quote in "\"'" if quote not in quotes]
    if any(isinstance(part, str) and "\\" in part for part in edit.parts):
        return None, "an f-string takes no backslash before Python 3.12"
    if not any(isinstance(part, str) and ('"' in part or "'" in part) for part in edit.parts):
        return edit, ""
    if not free:
        return None, "both kinds of quotes are in use in the f-string before Python 3.12"
    made = edit.with_text(lambda text: _replace_quotes(text, free[0]))
    if any(isinstance(part, str) and quote in part for part in made.parts for quote in quotes):
        return None, "its quotes are in use in the f-string before Python 3.12"
    return made, ""


def _replace_quotes(text: str, quote: str) -> str:
    return _PLAIN_STRING.sub(lambda found: f"{quote}{found[1] or found[2] or ''}{quote}", text)


def _is_at(unit: Unit, node: ast.expr) -> bool:
    """Return whether the text at the position of `node` parses to `node`."""
    try:
        written = ast.parse(f"({unit.segment(node)})", mode="eval").body
    except SyntaxError:
        return False
    return ast.dump(written) == ast.dump(node)


def _quotes(unit: Unit, string: ast.JoinedStr, node: ast.expr) -> set[str]:
    """Return the quotes of the literal in `string` that contains `node`; both kinds where it is not found."""
    start, end = unit.source.span(string)
    at = unit.source.span(node)[0] - start
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(f"({unit.text[start:end]})").readline))
    except (tokenize.TokenError, SyntaxError):
        return {'"', "'"}
    literals = [token.string for token in tokens if token.type == tokenize.STRING]
    offset = 0
    for literal in literals:
        offset = unit.text.find(literal, start + offset, end) - start
        if offset <= at < offset + len(literal):
            return {literal.lstrip("rRfFbBuU")[0]}
        offset += len(literal)
    return {'"', "'"}
