"""Splicing: the new text from the original text and its edits.

The edits are nested into a forest by containment and rendered from the outside in. The invariant is: *a rendered span
has as many line ends as the original one*. Where new text has fewer, the missing line ends are inserted where they do
not change the meaning:

    before a retained part so that it stays on its line
    at the end             inside the last closing bracket, else inside brackets put around the whole expression,
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
    """An edited text and the map of its positions to the original's."""

    text: str
    positions: PositionMap


@dataclass
class _PlacedEdit:
    """An edit with its spans as text offsets, and the edits nested in it."""

    edit: Edit
    start: int
    end: int
    parts: list[str | tuple[int, int]]
    inner: list[_PlacedEdit] = field(default_factory=list)


def splice(source: SourceFile, edits: Sequence[Edit]) -> Spliced:
    """Apply `edits` to `source`; see `gemini.instrument.text.edits.apply_edits`."""
    text = source.text
    if not edits:
        return Spliced(text, PositionMap.identity())
    bare = _bare_generators(source, edits)
    roots = _nest(source, [_place(source, edit, bare) for edit in edits])
    pieces = _add_spaces(_EditRenderer(source).region(0, len(text), roots), text)
    joined = "".join(piece.text if isinstance(piece, Added) else text[piece.start : piece.end] for piece in pieces)
    return Spliced(joined, PositionMap(source.lines, Lines(joined), pieces))


def _add_spaces(pieces: list[Piece], text: str) -> list[Piece]:
    """Add a space where the new text of an edit would join a word beside it."""

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
    """Return the edited generators that share the brackets of a call, as in ``sum(x for …)``."""
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


def _place(source: SourceFile, edit: Edit, bare: set[ast.AST]) -> _PlacedEdit:
    start, end = _offsets(source, edit, edit.span)
    parts: list[str | tuple[int, int]] = []
    for part in edit.parts:
        if isinstance(part, str):
            parts.append(part)
            continue
        retained = _offsets(source, edit, part)
        if retained[0] < start or retained[1] > end:
            raise EditError(
                f"{source.path}: {edit.describe()} retains a part outside of the edited span",
                line=edit.span.line,
                column=edit.span.column,
            )
        parts.append(retained)
    if edit.node in bare:
        parts = ["(", *parts, ")"]
    return _PlacedEdit(edit, start, end, parts)


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


def _nest(source: SourceFile, placed: Sequence[_PlacedEdit]) -> list[_PlacedEdit]:
    """Return the edits as a forest by containment; raise `EditError` where two conflict."""
    order = {id(one): number for number, one in enumerate(placed)}
    ordered = sorted(placed, key=lambda one: (one.start, -one.end, not one.edit.keeps_all, -order[id(one)]))
    roots: list[_PlacedEdit] = []
    open_edits: list[_PlacedEdit] = []
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
                continue  # two passes request the same replacement
            if not any(
                retained[0] <= one.start and one.end <= retained[1]
                for retained in around.parts
                if isinstance(retained, tuple)
            ):
                first, second = sorted((around, one), key=lambda each: order[id(each)])
                raise Conflict(first.edit, second.edit).error(source.path)
            around.inner.append(one)
        open_edits.append(one)
    return roots


def _same(first: _PlacedEdit, second: _PlacedEdit) -> bool:
    return (first.start, first.end) == (second.start, second.end)


class _EditRenderer:
    """Renders the nested edits of one source as pieces."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._text = source.text
        self._starts = source.lines.starts

    def region(self, start: int, end: int, edits: Sequence[_PlacedEdit]) -> list[Piece]:
        """Return the pieces of the original from `start` to `end`, with `edits` applied."""
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

    def _edit(self, one: _PlacedEdit) -> list[Piece]:
        retained = [part for part in one.parts if isinstance(part, tuple)]
        in_order = all(left[1] <= right[0] for left, right in pairwise(retained))
        out = _Output(one, isinstance(one.edit.node, ast.expr))
        for part in one.parts:
            if isinstance(part, str):
                out.add(part)
                continue
            if in_order:
                out.pad(self._count_missing(one, out, part[0]), self._line_ends(one, part[0]))
            inner = [each for each in one.inner if part[0] <= each.start and each.end <= part[1]]
            out.keep(self.region(*part, inner), self._line(part[1]) - self._line(part[0]))
        missing = self._count_missing(one, out, one.end)
        out.close(missing, self._line_ends(one, one.end), self._rest_of_line(one.end))
        return out.pieces

    def _count_missing(self, one: _PlacedEdit, out: _Output, offset: int) -> int:
        """Return how many line ends before `offset` in the original span the new text still lacks."""
        missing = self._line(offset) - self._line(one.start) - out.line_ends
        if missing < 0:
            raise EditError(
                f"{self._source.path}: {one.edit.describe()} has {-missing} more line end(s) than the replaced text, "
                "and would move the lines below\n    → write the new text on as many lines as the old",
                line=one.edit.span.line,
                column=one.edit.span.column,
            )
        return missing

    def _line(self, offset: int) -> int:
        return bisect_right(self._starts, offset)

    def _line_ends(self, one: _PlacedEdit, offset: int) -> list[str]:
        return line_ends(self._text[one.start : offset])

    def _rest_of_line(self, offset: int) -> str:
        line = self._line(offset)
        end = self._starts[line] if line < len(self._starts) else len(self._text)
        return self._text[offset:end].strip()


class _Output:
    """The pieces of one edit so far, with counts of line ends and open brackets."""

    def __init__(self, one: _PlacedEdit, expression: bool) -> None:
        self.pieces: list[Piece] = []
        self.line_ends = 0
        self._one = one
        self._expression = expression
        self._depth = 0
        self._bracketed = False

    def add(self, text: str) -> None:
        """Append new text."""
        if not text:
            return
        self.line_ends += len(line_ends(text))
        self._depth += bracket_depth(text)
        self.pieces.append(Added(text, self._one.start, self._one.end))

    def keep(self, pieces: list[Piece], ends: int) -> None:
        """Append a rendered, retained part."""
        self.pieces.extend(pieces)
        self.line_ends += ends

    def pad(self, missing: int, ends: list[str]) -> None:
        """Append the line ends that are missing before a retained part."""
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
        """Append the line ends that are missing at the end, and the enclosing bracket if one was opened."""
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
    """Return how many brackets `text` opens minus how many it closes, outside of strings."""
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
