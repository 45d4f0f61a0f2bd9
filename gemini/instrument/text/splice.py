"""Making edits: from the original text and the edits to the new text, piece by piece.

The edits are nested into a tree by containment and rendered from the outside in. One invariant carries everything:
*a rendered span has as many line ends as the original one*. Where new text has fewer, the missing line ends are put
back at a place where Python reads nothing into them:

    before a kept part    so that what is kept stays on its line
    at the end            inside the last closing bracket, else inside brackets put around the whole expression,
                          else (a statement) after it, with a backslash if more follows on the line
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from gemini.errors import EditError
from gemini.instrument.text.edits import Conflict, Edit, Span
from gemini.instrument.text.lines import Lines, line_ends
from gemini.instrument.text.positions import Added, Copied, Piece, PositionMap
from gemini.instrument.text.source_file import SourceFile

_OPEN, _CLOSE = "([{", ")]}"


class Spliced(NamedTuple):
    """An edited text and the way back."""

    text: str
    positions: PositionMap


@dataclass
class _Placed:
    """An edit with its spans as text offsets, and the edits nested in it."""

    edit: Edit
    start: int
    end: int
    parts: list[str | tuple[int, int]]
    inner: list[_Placed] = field(default_factory=list)


def splice(source: SourceFile, edits: Sequence[Edit]) -> Spliced:
    """Make `edits` in `source`; see `gemini.instrument.text.edits.apply`."""
    text = source.text
    if not edits:
        return Spliced(text, PositionMap.identity())
    bare = _bare_generators(source, edits)
    roots = _nest(source, [_place(source, edit, bare) for edit in edits])
    pieces = _spaced(_Renderer(source).region(0, len(text), roots), text)
    joined = "".join(piece.text if isinstance(piece, Added) else text[piece.start : piece.end] for piece in pieces)
    return Spliced(joined, PositionMap(source.lines, Lines(joined), pieces))


def _spaced(pieces: list[Piece], text: str) -> list[Piece]:
    """The pieces with a space where the new text of an edit would run into a word beside it: ``return(x)``."""

    def content(piece: Piece) -> str:
        return piece.text if isinstance(piece, Added) else text[piece.start : piece.end]

    made = list(pieces)
    for at in range(1, len(made)):
        left, right = made[at - 1], made[at]
        if not (_is_word(content(left)[-1:]) and _is_word(content(right)[:1])):
            continue
        if isinstance(right, Added) and right.first:
            made[at] = right._replace(text=f" {right.text}")
        elif isinstance(left, Added) and left.last:
            made[at - 1] = left._replace(text=f"{left.text} ")
    return made


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _bare_generators(source: SourceFile, edits: Sequence[Edit]) -> set[ast.AST]:
    """The edited generators that are a call's only argument and share its brackets, as in ``sum(x for …)``."""
    wanted = {edit.node for edit in edits if isinstance(edit.node, ast.GeneratorExp)}
    if not wanted:
        return set()
    found: set[ast.AST] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and len(node.args) == 1 and node.args[0] in wanted:
            only = node.args[0]
            if (only.end_lineno, only.end_col_offset) == (node.end_lineno, node.end_col_offset):
                found.add(only)
    return found


def _place(source: SourceFile, edit: Edit, bare: set[ast.AST]) -> _Placed:
    start, end = _offsets(source, edit, edit.span)
    parts: list[str | tuple[int, int]] = []
    for part in edit.parts:
        if isinstance(part, str):
            parts.append(part)
            continue
        kept = _offsets(source, edit, part)
        if kept[0] < start or kept[1] > end:
            raise EditError(
                f"{source.path}: {edit.describe()} keeps a part that lies outside of the edited span",
                line=edit.span.line,
                column=edit.span.column,
            )
        parts.append(kept)
    if edit.node in bare:
        parts = ["(", *parts, ")"]
    return _Placed(edit, start, end, parts)


def _offsets(source: SourceFile, edit: Edit, span: Span) -> tuple[int, int]:
    if not 1 <= span.line <= span.end_line <= source.lines.count:
        raise EditError(
            f"{source.path}: {edit.describe()} is outside of the file, which has {source.lines.count} lines",
            line=span.line,
        )
    start, end = source.offset(span.line, span.column), source.offset(span.end_line, span.end_column)
    if not start <= end <= len(source.text):
        raise EditError(f"{source.path}: {edit.describe()} ends before it begins", line=span.line, column=span.column)
    return start, end


def _nest(source: SourceFile, placed: Sequence[_Placed]) -> list[_Placed]:
    """The edits as a forest by containment; raises where two cannot both be made."""
    order = {id(one): number for number, one in enumerate(placed)}
    ordered = sorted(placed, key=lambda one: (one.start, -one.end, not one.edit.keeps_all, -order[id(one)]))
    roots: list[_Placed] = []
    open_edits: list[_Placed] = []
    for one in ordered:
        while open_edits and open_edits[-1].end <= one.start and not _same(open_edits[-1], one):
            open_edits.pop()
        if not open_edits:
            roots.append(one)
        else:
            around = open_edits[-1]
            if (
                _same(around, one)
                and around.edit.parts == one.edit.parts
                and not one.edit.keeps_all
                and one.start < one.end
            ):
                continue  # two passes that ask for the same replacement agree
            if not any(kept[0] <= one.start and one.end <= kept[1] for kept in around.parts if isinstance(kept, tuple)):
                first, second = sorted((around, one), key=lambda each: order[id(each)])
                raise Conflict(first.edit, second.edit).error(source.path)
            around.inner.append(one)
        open_edits.append(one)
    return roots


def _same(first: _Placed, second: _Placed) -> bool:
    return (first.start, first.end) == (second.start, second.end)


class _Renderer:
    """Turns the nested edits of one source into pieces."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._text = source.text
        self._starts = source.lines.starts

    def region(self, start: int, end: int, edits: Sequence[_Placed]) -> list[Piece]:
        """The pieces of the original from `start` to `end` with the `edits` in it made."""
        pieces: list[Piece] = []
        at = start
        for one in edits:
            if one.start > at:
                pieces.append(Copied(at, one.start))
            pieces.extend(self._edit(one))
            at = one.end
        if end > at:
            pieces.append(Copied(at, end))
        return pieces

    def _edit(self, one: _Placed) -> list[Piece]:
        kept = [part for part in one.parts if isinstance(part, tuple)]
        in_order = all(left[1] <= right[0] for left, right in pairwise(kept))
        out = _Output(one, isinstance(one.edit.node, ast.expr))
        for part in one.parts:
            if isinstance(part, str):
                out.add(part)
                continue
            if in_order:
                out.pad(self._missing(one, out, part[0]), self._line_ends(one, part[0]))
            inner = [each for each in one.inner if part[0] <= each.start and each.end <= part[1]]
            out.keep(self.region(*part, inner), self._line(part[1]) - self._line(part[0]))
        missing = self._missing(one, out, one.end)
        out.close(missing, self._line_ends(one, one.end), self._rest_of_line(one.end))
        return out.pieces

    def _missing(self, one: _Placed, out: _Output, offset: int) -> int:
        """How many line ends lie before `offset` in the original span that are not in the new text yet."""
        missing = self._line(offset) - self._line(one.start) - out.line_ends
        if missing < 0:
            raise EditError(
                f"{self._source.path}: {one.edit.describe()} has {-missing} more line end(s) than what it replaces, "
                "and would move the lines below\n    → keep the new text on the lines of the old",
                line=one.edit.span.line,
                column=one.edit.span.column,
            )
        return missing

    def _line(self, offset: int) -> int:
        return bisect_right(self._starts, offset)

    def _line_ends(self, one: _Placed, offset: int) -> list[str]:
        return line_ends(self._text[one.start : offset])

    def _rest_of_line(self, offset: int) -> str:
        line = self._line(offset)
        end = self._starts[line] if line < len(self._starts) else len(self._text)
        return self._text[offset:end].strip()


class _Output:
    """The pieces of one edit as they come, with the line ends and open brackets counted."""

    def __init__(self, one: _Placed, expression: bool) -> None:
        self.pieces: list[Piece] = []
        self.line_ends = 0
        self._one = one
        self._expression = expression
        self._depth = 0
        self._bracketed = False

    def add(self, text: str) -> None:
        """New text."""
        if not text:
            return
        self.line_ends += len(line_ends(text))
        self._depth += bracket_depth(text)
        self.pieces.append(Added(text, self._one.start, self._one.end))

    def keep(self, pieces: list[Piece], ends: int) -> None:
        """A kept part, rendered."""
        self.pieces.extend(pieces)
        self.line_ends += ends

    def pad(self, missing: int, ends: list[str]) -> None:
        """Line ends that are missing before a kept part."""
        if not missing:
            return
        breaks = ends[-missing:]
        if self._depth == 0 and not self._bracketed:
            if self._expression:
                self._bracket()
            else:
                breaks = ["\\" + one for one in breaks]
        self.add("".join(breaks))

    def close(self, missing: int, ends: list[str], rest: str) -> None:
        """Line ends that are missing at the end, and the bracket around all if one was opened."""
        if missing:
            breaks = "".join(ends[-missing:])
            last = self.pieces[-1] if self.pieces else None
            if isinstance(last, Added) and last.text.rstrip()[-1:] in tuple(_CLOSE):
                text = last.text.rstrip()
                self.pieces[-1] = last._replace(text=text[:-1] + breaks + text[-1] + last.text[len(text) :])
            elif self._bracketed or self._expression:
                self._bracket()
                self.add(breaks)
            elif rest and not rest.startswith("#"):
                self.add("".join("\\" + one for one in ends[-missing:]))
            else:
                self.add(breaks)
        if self._bracketed:
            self.add(")")
        if self.pieces and isinstance(self.pieces[0], Added):
            self.pieces[0] = self.pieces[0]._replace(first=True)
        if self.pieces and isinstance(self.pieces[-1], Added):
            self.pieces[-1] = self.pieces[-1]._replace(last=True)

    def _bracket(self) -> None:
        if not self._bracketed:
            self._bracketed = True
            self.pieces.insert(0, Added("(", self._one.start, self._one.end))


def bracket_depth(text: str) -> int:
    """How many brackets `text` opens and does not close (negative where it closes more); strings do not count."""
    depth = 0
    quote = ""
    skip = False
    for char in text:
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
    return depth
