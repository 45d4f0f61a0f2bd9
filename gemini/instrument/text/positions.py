"""Position map: from positions in an edited text to those in the original.

An edited text is a sequence of *pieces*: ranges copied from the original, and new text.

    original   x = torch.device("cuda")
                   └──────── S…E ──────┘
    edited     x = __gemini__.device(torch.device("cuda"))
               copy└────── new ─────┘└───── copy ───────┘└ new

A position in a copy maps to the character that was copied. A position in new text maps to the span of its edit: to S
as the start of a node, to E as the end of one. So a call wrapped around an expression has that expression's position,
and a traceback underlines the user's text as if nothing had been inserted. Edits never change the number of lines, so
whole lines without edits map to themselves.
"""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gemini.instrument.text.lines import Lines

Position = tuple[int, int]


class Copied(NamedTuple):
    """A copied range of the original text."""

    start: int
    end: int


class Added(NamedTuple):
    """New text for the original range from `start` to `end`; possibly the `first` or `last` piece of its edit."""

    text: str
    start: int
    end: int
    first: bool = False
    last: bool = False


Piece = Copied | Added


class PositionMap:
    """Maps `ast` positions of an edited text back to the original's; falsy where nothing was edited."""

    def __init__(self, original: Lines, edited: Lines, pieces: Sequence[Piece]) -> None:
        self._original = original
        self._edited = edited
        self._pieces = tuple(pieces)
        self._inner: PositionMap | None = None
        self._starts: list[int] = []
        offset = 0
        lines: set[int] = set()
        for piece in self._pieces:
            self._starts.append(offset)
            if isinstance(piece, Added):
                offset += len(piece.text)
                first, last = original.position(piece.start)[0], original.position(piece.end)[0]
                lines.update(range(first, last + 1))
            else:
                offset += piece.end - piece.start
        self.lines: tuple[int, ...] = tuple(sorted(lines))
        """The lines, ascending, on which positions differ from the original's."""

    @classmethod
    def identity(cls) -> PositionMap:
        """Return the map of a text without edits."""
        lines = Lines("")
        return cls(lines, lines, ())

    def __bool__(self) -> bool:
        return bool(self.lines)

    def after(self, inner: PositionMap) -> PositionMap:
        """Compose two maps: `inner` belongs to the edits that produced the original of this one."""
        if not inner or not self:
            return self or inner
        both = PositionMap(self._original, self._edited, self._pieces)
        both._inner = inner if self._inner is None else self._inner.after(inner)
        both.lines = tuple(sorted({*self.lines, *inner.lines}))
        return both

    def start(self, line: int, column: int) -> Position:
        """Return the original position of a node's start at (`line`, `column`)."""
        offset = self._edited.offset(line, column)
        at = bisect_right(self._starts, offset) - 1
        # Of several pieces at one offset only the last has characters.
        if at >= 0:
            piece = self._pieces[at]
            origin = piece.start if isinstance(piece, Added) else piece.start + offset - self._starts[at]
            line, column = self._original.position(origin)
        return self._inner.start(line, column) if self._inner else (line, column)

    def end(self, line: int, column: int) -> Position:
        """Return the original position of a node's end at (`line`, `column`)."""
        offset = self._edited.offset(line, column)
        at = bisect_left(self._starts, offset) - 1
        if at >= 0:
            piece = self._pieces[at]
            origin = piece.end if isinstance(piece, Added) else piece.start + offset - self._starts[at]
            line, column = self._original.position(origin)
        return self._inner.end(line, column) if self._inner else (line, column)

    def touches(self, first: int, last: int) -> bool:
        """Return whether a line from `first` to `last` was edited."""
        at = bisect_left(self.lines, first)
        return at < len(self.lines) and self.lines[at] <= last


def restore(tree: ast.Module, positions: PositionMap) -> None:
    """Set the positions of `tree`, parsed from the edited text, to those in the original (in place).

    Statements without an edited line are skipped: their positions are already the original's.
    """
    if not positions:
        return
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.stmt) and not positions.touches(first_line(node), node.end_lineno or node.lineno):
            continue
        if hasattr(node, "lineno"):
            _move(node, positions)
        stack.extend(ast.iter_child_nodes(node))


def first_line(node: ast.stmt) -> int:
    """Return the first line of a statement, including its decorators."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
        return min(node.lineno, node.decorator_list[0].lineno)
    return node.lineno


def _move(node: ast.AST, positions: PositionMap) -> None:
    place = vars(node)
    start = positions.start(place["lineno"], place["col_offset"])
    end = positions.end(place["end_lineno"], place["end_col_offset"])
    end = max(start, end)  # parts that an edit reordered may begin after they end
    place["lineno"], place["col_offset"] = start
    place["end_lineno"], place["end_col_offset"] = end
