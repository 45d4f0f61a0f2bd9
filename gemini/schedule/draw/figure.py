"""A schedule as a figure of matplotlib.

    y   0      ┌ phases: warm-up │ steady state │ cool-down
        row 0  │ ███░░███   blocks, idle hatched            (height BAR)
               │ ▁▂▃▂▁ ---  memory with its limit           (height MEMORY)
        row 1  …

The layout is in inches, so that text is only placed where it fits. Blocks of a kind go into one collection:
a plan of ten thousand blocks takes about as long as one of ten.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from gemini.errors import MissingEngineError
from gemini.schedule.block import Block, Number
from gemini.schedule.draw import palette
from gemini.schedule.draw.figure_layout import Layout, lay_out, text_width
from gemini.schedule.draw.timeline import Row, Timeline, shade
from gemini.schedule.text_grid import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_AN_INCH = 150
Corners = list[tuple[float, float]]


def render_figure(picture: Timeline, form: str, axis_width: float | None = None) -> bytes:
    """The picture as PNG, SVG or PDF; the width of its time axis, in inches, is chosen if not set."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingEngineError("matplotlib", "viz", "drawing a schedule") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"hatch.linewidth": 0.6, "svg.hashsalt": "gemini", "font.family": "DejaVu Sans"})
        layout = lay_out(picture, axis_width)
        figure = Figure(figsize=(layout.width, layout.height), facecolor="white")
        FigureCanvasAgg(figure)
        _draw(figure, picture, layout)
        content = io.BytesIO()
        undated: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=DOTS_AN_INCH, metadata=undated[form])
        return content.getvalue()


def _draw(figure: Figure, picture: Timeline, layout: Layout) -> None:
    box = (layout.left, layout.bottom, layout.axis_width, layout.axis_height)
    axes = figure.add_axes(
        (box[0] / layout.width, box[1] / layout.height, box[2] / layout.width, box[3] / layout.height)
    )
    axes.set_xlim(0, float(picture.end) or 1)
    axes.set_ylim(layout.axis_height, 0)  # inches from the top
    _idle(axes, picture, layout)
    _blocks(axes, picture, layout)
    if picture.shows_memory:
        _memory(axes, picture, layout)
    _phases(axes, picture, layout)
    _margins(axes, picture, layout)
    _heading(figure, picture, layout)
    _legend(figure, picture, layout)


# ---------------------------------------------------------------- rows


def _rectangle(begin: float, end: float, top: float, bottom: float) -> Corners:
    return [(begin, top), (end, top), (end, bottom), (begin, bottom)]


def _idle(axes: Axes, picture: Timeline, layout: Layout) -> None:
    from matplotlib.collections import PolyCollection

    gaps = [
        _rectangle(begin, end, layout.top_of(index), layout.top_of(index) + layout.bar)
        for index, row in enumerate(picture.rows)
        for begin, end in row.idle
    ]
    axes.add_collection(
        PolyCollection(
            gaps, facecolors=palette.IDLE, edgecolors=palette.IDLE_HATCH, hatch=layout.hatch, linewidths=0, zorder=1
        )
    )


def _blocks(axes: Axes, picture: Timeline, layout: Layout) -> None:
    from matplotlib.collections import PolyCollection

    corners, fills, edges = [], [], []
    for index, row in enumerate(picture.rows):
        top = layout.top_of(index)
        for block in row.blocks:
            start = picture.plan.step(block)
            corners.append(_rectangle(start, start + block.span, top, top + layout.bar))
            fills.append(palette.fill(block.mid, shade(block)))
            edges.append(palette.edge(block.mid, shade(block)))
            _label(axes, block, float(start), top, layout)
    axes.add_collection(
        PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=layout.outline, zorder=2)
    )


def _label(axes: Axes, block: Block, start: float, top: float, layout: Layout) -> None:
    text = layout.label(block)
    if text:
        axes.text(
            start + block.span / 2,
            top + layout.bar / 2,
            text,
            ha="center",
            va="center_baseline",
            fontsize=layout.label_size,
            color=palette.ink(shade(block)),
            zorder=3,
        )


def _memory(axes: Axes, picture: Timeline, layout: Layout) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    low, high = picture.memory_range
    scale = layout.memory / (float(high - low) or 1.0)
    areas: list[Corners] = []
    limits: list[Corners] = []
    floors: list[Corners] = []
    for index, row in enumerate(picture.rows):
        floor = layout.floor_of(index) + float(low) * scale  # where the curve is at zero
        areas.append(_steps(row, float(picture.end), floor, scale))
        floors.append([(0.0, floor), (float(picture.end), floor)])
        if row.limit is not None:
            height = floor - float(row.limit) * scale
            limits.append([(0.0, height), (float(picture.end), height)])
    axes.add_collection(PolyCollection(areas, facecolors=palette.MEMORY, edgecolors="none", zorder=2))
    outlines = [area[1:-1] for area in areas]
    axes.add_collection(LineCollection(outlines, colors=palette.MEMORY_EDGE, linewidths=0.8, zorder=3))
    axes.add_collection(LineCollection(floors, colors=palette.LINE, linewidths=0.6, zorder=1))
    axes.add_collection(
        LineCollection(
            limits,
            colors=palette.LIMIT,
            linewidths=min(0.9, 2.6 * layout.bar),
            linestyles=(0, (4, 3)),
            zorder=4,
            clip_on=False,
        )
    )


def _steps(row: Row, end: float, floor: float, scale: float) -> Corners:
    """The area under a memory curve, which changes in steps."""
    points = [(0.0, floor)]
    height = floor
    for time, held in row.memory:
        points.append((float(time), height))
        height = floor - float(held) * scale
        points.append((float(time), height))
    return [*points, (end, height), (end, floor)]


# ---------------------------------------------------------------- surroundings of the rows


def _phases(axes: Axes, picture: Timeline, layout: Layout) -> None:
    if picture.phases is None:
        return
    top, bottom = layout.strip
    per_unit = layout.axis_width / (float(picture.end) or 1)
    for name, begin, end in picture.sections:
        axes.fill([begin, end, end, begin], [top, top, bottom, bottom], color=palette.PHASES[name], lw=0, zorder=1)
        text = layout.first_fitting(_phase_texts(name, picture), float(end - begin) * per_unit, layout.strip_size)
        axes.text(
            float(begin + end) / 2,
            (top + bottom) / 2,
            text,
            ha="center",
            va="center_baseline",
            fontsize=layout.strip_size,
            color=palette.INK,
            zorder=3,
        )
    phases, foot = picture.phases, layout.axis_height
    first = [phases.begin, phases.begin + phases.length]
    axes.fill([*first, *first[::-1]], [bottom, bottom, foot, foot], color=palette.REPETEND, lw=0, zorder=0)
    for at in (phases.begin, phases.end):  # behind the blocks: their labels stay readable
        axes.plot([at, at], [top, foot], color=palette.INK, lw=0.9, ls=(0, (5, 3)), zorder=1.5)
    _kernel_ticks(axes, picture, layout)


def _phase_texts(name: str, picture: Timeline) -> list[str]:
    """Candidate labels of a phase, longest first."""
    phases = picture.phases
    if name != "steady state" or phases is None:
        return [name]
    times = f"× {phases.kernels}"
    each = f" · {format_time(phases.length)} each"
    micros = f" for {phases.nmicros} micro-batches" if phases.nmicros > 1 else ""
    return [f"repetend {times}{each}{micros}", f"repetend {times}", times]


def _kernel_ticks(axes: Axes, picture: Timeline, layout: Layout) -> None:
    """Short marks where one repetend ends and the next begins, as long as they are distinguishable."""
    phases = picture.phases
    per_unit = layout.axis_width / (float(picture.end) or 1)
    if phases is None or float(phases.length) * per_unit < 0.06:
        return
    _, bottom = layout.strip
    for kernel in range(1, phases.kernels):
        at = float(phases.begin + kernel * phases.length)
        axes.plot([at, at], [bottom, bottom + 0.05], color=palette.INK, lw=0.6, zorder=3)


def _margins(axes: Axes, picture: Timeline, layout: Layout) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette.LINE)
    middles = [layout.top_of(index) + layout.bar / 2 for index in range(len(picture.rows))]
    axes.set_yticks(middles, [picture.row_label(index) for index in range(len(picture.rows))])
    axes.tick_params(axis="y", length=0, labelsize=layout.row_size, labelcolor=palette.INK, pad=6)
    axes.tick_params(axis="x", color=palette.LINE, labelsize=layout.row_size, labelcolor=palette.FAINT)
    time, memory = picture.units
    axes.set_xlabel(f"time ({time})" if time else "time", fontsize=layout.row_size, color=palette.FAINT)
    for index, row in enumerate(picture.rows):
        if picture.shows_memory:
            limit = f" of {_amount(row.limit, memory)}" if row.limit is not None else ""
            axes.text(
                1,
                layout.floor_of(index) - layout.memory / 2,
                f"  peak {_amount(row.peak, memory)}{limit}",
                transform=axes.get_yaxis_transform(),
                ha="left",
                va="center",
                fontsize=layout.row_size,
                color=palette.FAINT,
            )


def _amount(value: Number, unit: str) -> str:
    """An amount of memory; where it has a unit, to three digits."""
    if not unit:
        return format_time(value)
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def _heading(figure: Figure, picture: Timeline, layout: Layout) -> None:
    left = layout.left / layout.width
    title = figure.text(left, 1 - 0.2 / layout.height, picture.title, fontsize=13, weight="bold", va="top")
    title.set_color(palette.INK)
    facts = "   ·   ".join(f"{name} {value}" for name, value in picture.headline)
    figure.text(left, 1 - 0.47 / layout.height, facts, fontsize=9.5, va="top", color=palette.FAINT)


def _legend(figure: Figure, picture: Timeline, layout: Layout) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {block.btype: shade(block) for block in picture.plan}
    handles: list[Any] = []
    for kind, tone in sorted(kinds.items(), key=lambda item: (item[1], item[0])):
        edge = palette.NEUTRAL[palette.DARK] if tone == palette.OTHER else "none"
        face = "white" if tone == palette.OTHER else palette.NEUTRAL[tone]
        handles.append(Patch(facecolor=face, edgecolor=edge, label=kind.replace("_", " ")))
    handles.append(Patch(facecolor=palette.IDLE, edgecolor=palette.IDLE_HATCH, hatch="/////", lw=0, label="idle"))
    if picture.shows_memory:
        handles.append(Patch(facecolor=palette.MEMORY, edgecolor="none", label="memory"))
    if any(row.limit is not None for row in picture.rows):
        handles.append(Line2D([], [], color=palette.LIMIT, lw=0.9, ls=(0, (4, 3)), label="memory limit"))
    _legend_line(figure, handles, layout, "lower left", layout.left)
    micros = _micro_legend(picture)
    widths = [text_width(handle.get_label(), layout.row_size) + 0.36 for handle in [*handles, *micros]]
    if micros and sum(widths) < layout.axis_width:
        _legend_line(figure, micros, layout, "lower right", layout.left + layout.axis_width)


def _micro_legend(picture: Timeline) -> list[Any]:
    """The colours of the micro-batches; past the last colour they begin again."""
    from matplotlib.patches import Patch

    count, hues = 1 + max((block.mid for block in picture.plan), default=-1), len(palette.MICRO_BATCHES)
    names = [f"{hue}, {hue + hues}, …" if count > hues else str(hue) for hue in range(min(count, hues))]
    names[:1] = [f"micro-batch {name}" for name in names[:1]]
    return [Patch(facecolor=palette.fill(hue, palette.MIDDLE), label=name) for hue, name in enumerate(names)]


def _legend_line(figure: Figure, handles: list[Any], layout: Layout, where: str, at: float) -> None:
    figure.legend(
        handles=handles,
        loc=where,
        bbox_to_anchor=(at / layout.width, 0.13 / layout.height),
        bbox_transform=figure.transFigure,
        ncols=len(handles),
        frameon=False,
        fontsize=layout.row_size,
        handlelength=1.3,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.3,
        borderaxespad=0,
        borderpad=0,
        labelcolor=palette.FAINT,
    )
