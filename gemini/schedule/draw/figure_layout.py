"""Figure layout: sizes and positions in the figure of a schedule, in inches.

┌─ left ─┬────────── axis_width ──────────┬ right ┐
│        │ title, figures                 │       │
│        │ strip with the phases          │       │
│ device │ bar (blocks)                   │       │ ┐ pitch
│        │ memory                         │ peak  │ ┘
│        │ time axis, legend              │       │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.schedule.block import Block
from gemini.schedule.draw.timeline import Timeline

NARROWEST, WIDEST, WIDEST_OF_ALL = 7.0, 22.0, 60.0
BLOCK_WIDTH, LEAST_BLOCK_WIDTH = 0.29, 0.03
TALLEST = 60.0
EM = 0.62  # width of a character, as a share of the type size
POINTS_AN_INCH = 72


@dataclass(frozen=True)
class Layout:
    """Sizes and places, in inches; type sizes in points."""

    left: float
    axis_width: float
    right: float
    head: float
    strip_height: float
    bar: float
    memory: float
    gap: float
    spacing: float
    rows: int
    bottom: float
    per_unit: float
    label_form: str  # "action", "micro-batch" or ""
    label_size: float
    row_size: float
    strip_size: float
    outline: float

    @property
    def pitch(self) -> float:
        """From one row to the next."""
        return self.bar + self.gap + self.memory + self.spacing

    @property
    def width(self) -> float:
        """Of the whole figure."""
        return self.left + self.axis_width + self.right

    @property
    def axis_height(self) -> float:
        """Of the phases' strip and all rows."""
        return self.strip_height + self.rows * self.pitch

    @property
    def height(self) -> float:
        """Of the whole figure."""
        return self.head + self.axis_height + self.bottom

    @property
    def strip(self) -> tuple[float, float]:
        """Top and bottom of the phases' strip."""
        return 0.0, max(self.strip_height - 0.1, 0.0)

    @property
    def hatch(self) -> str:
        """Denser lines where bars are low."""
        return "////" if self.bar > 0.25 else "//////"

    def top_of(self, row: int) -> float:
        """Where the bar of a row begins."""
        return self.strip_height + row * self.pitch

    def floor_of(self, row: int) -> float:
        """The baseline of the memory curve of a row."""
        return self.top_of(row) + self.bar + self.gap + self.memory

    def label(self, block: Block) -> str:
        """The label of a block: its name, its micro-batch, or nothing where neither fits."""
        texts = {"action": str(block), "micro-batch": str(block.mid), "": ""}
        return self.first_fitting([texts[self.label_form]], float(block.span) * self.per_unit, self.label_size)

    @staticmethod
    def first_fitting(texts: Sequence[str], width: float, size: float) -> str:
        """The first of `texts` that fits into `width` inches at type size `size`."""
        return next((text for text in texts if text_width(text, size) <= width), "")


def text_width(text: str, size: float) -> float:
    """About how wide a text is, with a little air on both sides."""
    return (len(text) * EM + 0.4) * size / POINTS_AN_INCH


def lay_out(picture: Timeline, axis_width: float | None = None) -> Layout:
    """Choose sizes for this many rows and blocks; the width of the time axis may be fixed, to compare pictures."""
    rows = len(picture.rows)
    spans = sorted(float(block.span) for block in picture.plan) or [1.0]
    typical, end = spans[len(spans) // 5], float(picture.end) or 1.0  # four of five blocks are as wide or wider
    if axis_width is None:
        axis_width = max(NARROWEST, min(end / typical * BLOCK_WIDTH, WIDEST))
        axis_width = min(max(axis_width, end / typical * LEAST_BLOCK_WIDTH), WIDEST_OF_ALL)
    per_unit = axis_width / end
    crowding = min(1.0, max(0.55, 1.12 - rows * 0.018))
    shrink = min(1.0, TALLEST / (rows * 0.8 * crowding))
    bar = 0.36 * crowding * shrink
    label_form, label_size = _labels(picture, per_unit, bar)
    row_size = max(min(9.0, 9.0 * crowding + 1.2) * shrink, 3.0)
    return Layout(
        left=0.35 + text_width(picture.row_label(rows - 1), row_size),
        axis_width=axis_width,
        right=1.25 if picture.shows_memory else 0.35,
        head=0.82,
        strip_height=0.36 if picture.phases is not None else 0.0,
        bar=bar,
        memory=0.22 * crowding * shrink if picture.shows_memory else 0.0,
        gap=0.05 * crowding * shrink if picture.shows_memory else 0.0,
        spacing=0.2 * crowding * shrink,
        rows=rows,
        bottom=0.8,
        per_unit=per_unit,
        label_form=label_form,
        label_size=label_size,
        row_size=row_size,
        strip_size=8.5,
        outline=0.8 if typical * per_unit > 0.12 else 0.25 if typical * per_unit > 0.04 else 0.0,
    )


def _labels(picture: Timeline, per_unit: float, bar: float) -> tuple[str, float]:
    """The fullest kind of label that fits on all blocks, or at least on those of nine tenths of all work; its size."""
    blocks = list(picture.plan)
    work = sum(float(block.span) for block in blocks)
    sizes = {"action": (8.5, 7.5, 6.5), "micro-batch": (8.5, 7.0, 5.5)}
    for form, share in (("action", 0.999), ("action", 0.9), ("micro-batch", 0.999), ("micro-batch", 0.9)):
        for size in sizes[form]:
            fits = sum(
                float(block.span)
                for block in blocks
                if text_width(str(block) if form == "action" else str(block.mid), size) <= float(block.span) * per_unit
            )
            if fits >= share * work and size / POINTS_AN_INCH * 1.3 <= bar:
                return form, size
    return "", 6.0
