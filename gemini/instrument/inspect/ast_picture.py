"""Picture of a syntax tree: an outline as boxes, coloured by recognised kind.

Statements are drawn downwards, indented like source; the expressions of a statement to its right. Long files are set in
columns, so that the picture fits the width of a screen:

    Module train.py
     ├ ClassDef Net(nn.Module)             FunctionDef train(…)
     │  └ FunctionDef __init__(self)        └ For images, labels in loader
     │     └ Assign self.fc = … ─ Call torch.nn.Linear(784, 10)

This module computes every position; graphviz only renders (its engine `nop2`).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gemini.instrument.inspect.ast_outline import OutlineItem
from gemini.instrument.inspect.finding import KINDS

# Points, the unit of graphviz; a screen has 96 pixels to 72 points.
FONT_SIZE = 10.0
_CHARACTER = FONT_SIZE * 0.602  # of a monospaced font
_ROW = 21.0
_BOX = 16.5
_PAD = 9.0
_INDENT = 18.0
_GAP = 16.0
_COLUMN_GAP = 30.0
SCREEN_WIDTH = 1390.0  # 1,853 pixels
_TALL = 1250.0  # a higher column is split into two
_MOST_COLUMNS = 3
_TEXT = 64  # characters shown of a text

_PLAIN, _LINE, _CHANGED = "#f7f7f5", "#9a9a9a", "#d6291e"


@dataclass
class Box:
    """An item with its left edge and row in its column."""

    item: OutlineItem
    x: float
    row: int
    parent: int = -1
    beside: bool = False  # to the right of its parent, not below it

    @property
    def label(self) -> str:
        """The text in the box."""
        text = shorten(self.item.text, _TEXT)
        return f"{self.item.type} {text}".strip()

    @property
    def width(self) -> float:
        """Points from edge to edge."""
        return len(self.label) * _CHARACTER + 2 * _PAD


@dataclass
class Column:
    """Boxes below each other."""

    boxes: list[Box] = field(default_factory=list)
    rows: int = 0

    def place(self, item: OutlineItem, x: float, limit: float) -> None:
        """Append `item` and all below it to the column, within `limit` points of width where possible."""
        self._place(Box(item, x, self.rows), limit)

    def _place(self, box: Box, limit: float) -> None:
        at = len(self.boxes)
        self.boxes.append(box)
        self.rows = max(self.rows, box.row + 1)
        right = box.x + box.width + _GAP
        for number, part in enumerate(box.item.parts):
            fits = right + Box(part, 0, 0).width <= limit
            row = box.row if number == 0 and fits else self.rows
            self._place(Box(part, right if fits else box.x + _INDENT, row, parent=at, beside=fits), limit)
        for child in box.item.body:
            self._place(Box(child, box.x + _INDENT, self.rows, parent=at), limit)

    @property
    def width(self) -> float:
        """Points to the right edge of the widest box."""
        return max((box.x + box.width for box in self.boxes), default=0.0)


def shorten(text: str, most: int) -> str:
    """Return `text` on one line, cut to at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def columns_of(root: OutlineItem) -> list[Column]:
    """Return the items of `root` in as many columns as their height needs and the screen allows."""
    best: list[Column] = []
    for count in range(1, _MOST_COLUMNS + 1):
        limit = (SCREEN_WIDTH - _COLUMN_GAP * (count - 1)) / count
        columns = _fill_columns(root.body, count, limit)
        width = sum(column.width for column in columns) + _COLUMN_GAP * (len(columns) - 1)
        if best and width > SCREEN_WIDTH:
            break
        best = columns
        if max(column.rows for column in columns) * _ROW <= _TALL:
            break
    return best


def _fill_columns(items: Sequence[OutlineItem], count: int, limit: float) -> list[Column]:
    """Return `items` in `count` columns of similar height; items are not split."""
    heights = []
    for item in items:
        trial = Column()
        trial.place(item, 0.0, limit)
        heights.append(trial.rows)
    share = _smallest_height(heights, count)
    columns = [Column()]
    for item, height in zip(items, heights):
        if columns[-1].rows and columns[-1].rows + height > share:
            columns.append(Column())
        columns[-1].place(item, 0.0, limit)
    return columns


def _smallest_height(heights: Sequence[int], count: int) -> int:
    """Return the smallest column height with which `heights`, in order, need at most `count` columns."""
    low, high = max(heights, default=0), sum(heights)
    while low < high:
        middle = (low + high) // 2
        columns, used = 1, 0
        for height in heights:
            if used + height > middle:
                columns, used = columns + 1, 0
            used += height
        low, high = (low, middle) if columns <= count else (middle + 1, high)
    return low


def to_dot(root: OutlineItem, *, title: str, note: str = "") -> str:
    """Return the picture as DOT text with all positions."""
    drawing = _Drawing(root, title, note)
    return drawing.text()


class _Drawing:
    def __init__(self, root: OutlineItem, title: str, note: str) -> None:
        self.columns = columns_of(root)
        self.title, self.note = title, note
        widths = sum(column.width for column in self.columns) + _COLUMN_GAP * (len(self.columns) - 1)
        self.kinds = [kind for kind in KINDS if any(item.kind == kind for item in root.walk())]
        self.has_changes = any(item.changed for item in root.walk())
        self.width = max(widths, 420.0)
        self.lines: list[str] = []

    def text(self) -> str:
        below = self._heading()
        rows = max(column.rows for column in self.columns)
        left = 0.0
        for number, column in enumerate(self.columns):
            self._column(column, number, left, below)
            left += column.width + _COLUMN_GAP
        head = [
            "digraph ast {",
            f'  graph [layout=nop2, bgcolor=white, pad="0.15", bb="0,{_number(below - rows * _ROW)},'
            f'{_number(self.width)},0"];',
            f'  node [shape=box, style="filled,rounded", fixedsize=true, height={_number(_BOX / 72)}, margin=0,'
            f' fontname="DejaVu Sans Mono,Menlo,Consolas,monospace", fontsize={FONT_SIZE}, color="{_LINE}"];',
            f'  edge [arrowhead=none, color="{_LINE}", penwidth=0.8];',
        ]
        return "\n".join([*head, *self.lines, "}", ""])

    def _heading(self) -> float:
        """Add the title and the legend; return the height at which the tree begins."""
        title = f"<b>{html.escape(self.title)}</b>" + (f"  {html.escape(self.note)}" if self.note else "")
        self._plain_text("title", f"<{title}>", len(self.title) + len(self.note) + 3, 0.0, 0.0)
        x, y = 0.0, -_ROW * 1.1
        marks = [(kind, KINDS[kind].colour, False) for kind in self.kinds]
        if self.has_changes:
            marks.append(("changed", _PLAIN, True))
        for name, colour, changed in marks:
            width = len(name) * _CHARACTER + 2 * _PAD
            if x + width > self.width:
                x, y = 0.0, y - _ROW
            self._box(
                f"legend_{name.replace(' ', '_')}", html.escape(name), (x, y), width, colour=colour, changed=changed
            )
            x += width + 6
        return y - _ROW * 1.4

    def _column(self, column: Column, number: int, left: float, top: float) -> None:
        for at, box in enumerate(column.boxes):
            x, y = left + box.x, top - box.row * _ROW
            name = f"n{number}_{at}"
            colour = KINDS[box.item.kind].colour if box.item.kind else _PLAIN
            hint = f"line {box.item.line}" if box.item.line else ""
            state = {"changed": box.item.changed, "folded": not box.item.type}
            self._box(name, _label(box), (x, y), box.width, colour=colour, hint=hint, **state)
            if box.parent >= 0:
                above = column.boxes[box.parent]
                path = _path(box, above, left, top)
                self.lines.append(f'  n{number}_{box.parent} -> {name} [pos="{path}"];')

    def _box(
        self,
        name: str,
        label: str,
        place: tuple[float, float],
        width: float,
        *,
        colour: str,
        hint: str = "",
        changed: bool = False,
        folded: bool = False,
    ) -> None:
        extra = f', tooltip="{hint or " "}"'  # shown by browsers
        if changed:
            extra += f', color="{_CHANGED}", penwidth=2'
        if folded:
            extra += ', style="rounded,dashed,filled", fontcolor="#666666"'
        self.lines.append(
            f'  {name} [label=<{label}>, pos="{_number(place[0] + width / 2)},{_number(place[1])}",'
            f' width={_number(width / 72)}, fillcolor="{colour}"{extra}];'
        )

    def _plain_text(self, name: str, label: str, characters: int, x: float, y: float) -> None:
        width = characters * _CHARACTER
        self.lines.append(
            f'  {name} [label={label}, shape=plaintext, style="", pos="{_number(x + width / 2)},{_number(y)}",'
            f" width={_number(width / 72)}];"
        )


def _label(box: Box) -> str:
    text = html.escape(shorten(box.item.text, _TEXT))
    if not box.item.type:
        return text or " "
    return f'<font color="#5a5a66"><b>{box.item.type}</b></font>' + (f" {text}" if text else "")


def _path(box: Box, above: Box, left: float, top: float) -> str:
    """Return the line from a box to its parent: along the row, or down and along."""
    y, x = top - box.row * _ROW, left + box.x
    upper = top - above.row * _ROW
    if box.beside:
        start = left + above.x + above.width
        bend = start + _GAP / 2
        corners = (
            [(start, upper), (x, y)] if box.row == above.row else [(start, upper), (bend, upper), (bend, y), (x, y)]
        )
    else:
        stem = left + above.x + _INDENT / 2
        corners = [(stem, upper - _BOX / 2), (stem, y), (x, y)]
    return _polyline(corners)


def _polyline(corners: Iterable[tuple[float, float]]) -> str:
    """Return straight lines as Bézier curves for graphviz, with control points on the line."""
    points = list(corners)
    control = [points[0]]
    for (ax, ay), (bx, by) in pairwise(points):
        control += [
            (ax + (bx - ax) / 3, ay + (by - ay) / 3),
            (ax + 2 * (bx - ax) / 3, ay + 2 * (by - ay) / 3),
            (bx, by),
        ]
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in control)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
