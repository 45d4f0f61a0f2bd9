"""Edits: replacements of spans, the only means by which a pass changes source.

A pass reads the tree and returns edits; the rest of the text stays as it is, so comments and formatting survive and
every line keeps its number. The new content of an edit is a sequence of *parts*: strings, and retained spans inside the
edited one, in which other edits may apply.

    Edit.replace(node, "x")            ("x",)
    Edit.before(node, "a; ")           ("a; ", node)
    Edit.wrap(node, "f(", ", 1)")      ("f(", node, ", 1)")
    Edit.rebuild(call, ["g(", arg, ")"])

Edits nest: one may lie in a span that another retains. Of two edits of the same span the later one encloses the
earlier. Edits that cross, or that lie in text another one removes, raise an `EditError` that names both.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gemini.errors import EditError
from gemini.instrument.text.source_file import SourceFile

if TYPE_CHECKING:
    from gemini.instrument.text.splice import Spliced


class Span(NamedTuple):
    """A range of source in `ast` positions: lines from 1, columns in UTF-8 bytes from 0."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, node: ast.AST) -> Span:
        """Return the span of `node`; operators, `arguments` and `comprehension` have none."""
        place = vars(node)
        if place.get("end_col_offset") is None or place.get("end_lineno") is None:
            raise EditError(
                f"an {type(node).__name__} node has no position in the source and cannot be edited\n"
                "    → edit a node inside it, or the statement or expression around it"
            )
        return cls(place["lineno"], place["col_offset"], place["end_lineno"], place["end_col_offset"])


Part = str | Span

# As arguments of a call these need brackets of their own: they would read as several arguments, or not parse.
_NEEDS_BRACKETS = (ast.Tuple, ast.NamedExpr, ast.Yield, ast.YieldFrom)
_NO_EXPRESSION = (ast.Starred, ast.Slice, ast.keyword, ast.arg, ast.alias, ast.FormattedValue)


@dataclass(frozen=True)
class Edit:
    """One span of the source and the parts that replace it; `reason` is shown to users."""

    span: Span
    parts: tuple[Part, ...]
    reason: str = ""
    node: ast.AST | None = field(default=None, compare=False, repr=False)

    @classmethod
    def replace(cls, node: ast.AST, text: str, reason: str = "") -> Edit:
        """Replace `node` by `text`."""
        return cls(Span.of(node), (text,), reason, node)

    @classmethod
    def before(cls, node: ast.AST, text: str, reason: str = "") -> Edit:
        """Insert `text` right before `node`."""
        span = Span.of(node)
        return cls(span, (text, span), reason, node)

    @classmethod
    def after(cls, node: ast.AST, text: str, reason: str = "") -> Edit:
        """Insert `text` right after `node`."""
        span = Span.of(node)
        return cls(span, (span, text), reason, node)

    @classmethod
    def wrap(cls, node: ast.AST, prefix: str, suffix: str, reason: str = "") -> Edit:
        """Insert `prefix` before and `suffix` after the expression `node`, which stays one expression."""
        if isinstance(node, _NO_EXPRESSION):
            raise EditError(
                f"line {node.lineno}: an {type(node).__name__} is not an expression and cannot be "
                "wrapped\n    → wrap the value inside it"
            )
        span = Span.of(node)
        if isinstance(node, _NEEDS_BRACKETS):
            prefix, suffix = prefix + "(", ")" + suffix
        return cls(span, (prefix, span, suffix), reason, node)

    @classmethod
    def rebuild(cls, node: ast.AST, parts: Sequence[str | ast.AST | Span], reason: str = "") -> Edit:
        """Replace `node` by strings and parts of it: nodes or spans, retained as written."""
        made = tuple(Span.of(part) if isinstance(part, ast.AST) else part for part in parts)
        return cls(Span.of(node), made, reason, node)

    @classmethod
    def insert(cls, line: int, column: int, text: str, reason: str = "") -> Edit:
        """Insert `text` at one position."""
        return cls(Span(line, column, line, column), (text,), reason)

    @property
    def keeps_all(self) -> bool:
        """Whether the edit retains the whole span and only adds text at its ends."""
        return self.span in self.parts

    def with_text(self, change: Callable[[str], str]) -> Edit:
        """Return the edit with `change` applied to its new text."""
        parts = tuple(change(part) if isinstance(part, str) else part for part in self.parts)
        return Edit(self.span, parts, self.reason, self.node)

    def describe(self) -> str:
        """Return the edit as one line: its position and new content, with ``…`` for retained spans."""
        content = "".join(part if isinstance(part, str) else "…" for part in self.parts)
        return f"line {self.span.line}, column {self.span.column + 1}: {content!r}"


class Conflict(NamedTuple):
    """Two edits that cannot both be made."""

    first: Edit
    second: Edit

    def error(self, path: str) -> EditError:
        """Return the conflict as an error that names both edits."""
        return EditError(
            f"{path}: two edits overlap\n"
            f"  - {self.first.describe()}{_because(self.first)}\n"
            f"  - {self.second.describe()}{_because(self.second)}\n"
            "    → retain the span of one inside the other (Edit.wrap, Edit.rebuild), or edit smaller nodes",
            line=self.second.span.line,
            column=self.second.span.column,
        )


def _because(edit: Edit) -> str:
    return f" ({edit.reason})" if edit.reason else ""


def apply_edits(source: SourceFile, edits: Iterable[Edit]) -> Spliced:
    """Apply `edits` to `source`; return the new text and the map of its positions to the original's.

    Without edits the text is the original's. Raises `EditError` where edits overlap, lie outside of the source or
    would change the number of lines.
    """
    from gemini.instrument.text.splice import splice

    return splice(source, list(edits))
