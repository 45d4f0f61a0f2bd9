"""Where a place in an edited text was in the original.

An edited text is a row of *pieces*: stretches copied from the original and stretches that are new.

    original   x = torch.device("cuda")
                   └──────── S…E ──────┘
    edited     x = __gemini__.device(torch.device("cuda"))
               copy└────── new ─────┘└───── copy ───────┘└ new

A place in a copy maps to the very character it was copied from. A place in new text stands for the whole span of
the edit that brought it: read as a beginning it maps to S, read as an end to E. So a call wrapped around an
expression carries that expression's own position, and a traceback underlines the user's text as if nothing had been
inserted. Edits never change the number of lines, so whole lines without edits map to themselves.
"""

from __future__ import annotations

import ast
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gemini.instrument.text.lines import Lines

Position = tuple[int, int]


class Copied(NamedTuple):
    """A stretch of the original text, taken over as it is."""

    start: int
    end: int


class Added(NamedTuple):
    """New text, standing for the original stretch from `start` to `end`; maybe the `first` or `last` of its edit."""

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
        """The map of a text that was not edited."""
        lines = Lines("")
        return cls(lines, lines, ())

    def __bool__(self) -> bool:
        return bool(self.lines)

    def after(self, inner: PositionMap) -> PositionMap:
        """The map of two edits in a row: `inner` made the text that this map calls its original."""
        if not inner or not self:
            return self or inner
        both = PositionMap(self._original, self._edited, self._pieces)
        both._inner = inner if self._inner is None else self._inner.after(inner)
        both.lines = tuple(sorted({*self.lines, *inner.lines}))
        return both

    def start(self, line: int, column: int) -> Position:
        """The original position of what begins at (`line`, `column`)."""
        offset = self._edited.offset(line, column)
        at = bisect_right(self._starts, offset) - 1
        # Of several pieces at one offset the last has characters; the ones before it are empty.
        if at >= 0:
            piece = self._pieces[at]
            origin = piece.start if isinstance(piece, Added) else piece.start + offset - self._starts[at]
            line, column = self._original.position(origin)
        return self._inner.start(line, column) if self._inner else (line, column)

    def end(self, line: int, column: int) -> Position:
        """The original position of what ends before (`line`, `column`)."""
        offset = self._edited.offset(line, column)
        at = bisect_left(self._starts, offset) - 1
        if at >= 0:
            piece = self._pieces[at]
            origin = piece.end if isinstance(piece, Added) else piece.start + offset - self._starts[at]
            line, column = self._original.position(origin)
        return self._inner.end(line, column) if self._inner else (line, column)

    def touches(self, first: int, last: int) -> bool:
        """Whether a line from `first` to `last` was edited."""
        at = bisect_left(self.lines, first)
        return at < len(self.lines) and self.lines[at] <= last


def restore(tree: ast.Module, positions: PositionMap) -> None:
    """Give every node of `tree`, parsed from the edited text, its position in the original (in place).

    Statements without an edited line are passed over whole: their positions are the original's already.
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
    """The line a statement begins on, its decorators included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
        return min(node.lineno, node.decorator_list[0].lineno)
    return node.lineno


def _move(node: ast.AST, positions: PositionMap) -> None:
    place = vars(node)
    start = positions.start(place["lineno"], place["col_offset"])
    end = positions.end(place["end_lineno"], place["end_col_offset"])
    end = max(start, end)  # parts that an edit put in another order may begin after they end
    place["lineno"], place["col_offset"] = start
    place["end_lineno"], place["end_col_offset"] = end
