"""Picture of an analysis: bars per worker for time and memory, and the graph coloured by stage.

    time, ms                          memory, MB
    ┆- - - - - - - ideal - - -┆        ┌─┐ ── limit
    █ █ █ █  stages, stacked           █ █ █ █  weights, gradients, optimizer, activations, working
    0 1 2 3  worker                    0 1 2 3
    ■ 0  bert.embeddings … encoder.layer.5          the stages, in the colours of the graph

Bars go to the requested file, the graph to one beside it: `cut.svg` and `cut.graph.svg`.
"""

from __future__ import annotations

import colorsys
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.errors import ArtifactError, MissingEngineError
from gemini.ir.graph_picture import PALETTE, fold_for
from gemini.partition.analysis.analysis_result import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gemini.ir.graph import Graph

SUFFIXES = (".svg", ".png", ".pdf")
MEMORY_PARTS = (
    ("weights_mb", "weights", "#3d6fa8"),
    ("gradients_mb", "gradients", "#7fb2e5"),
    ("optimizer_mb", "optimizer", "#c3d5e8"),
    ("activations_mb", "activations", "#e8a13c"),
    ("working_mb", "workspace", "#f3d7a6"),
)
_INK, _FAINT, _LINE, _LIMIT = "#1f2328", "#656d76", "#d0d7de", "#b3261e"
_LIGHT, _DARK = "#dfe3e8", "#98a1ad"  # forward and backward in the legend
_DOTS = 150
_ROW = 0.2  # inches per line of the list of stages
_ROWS = 16  # of that list per column
_WIDEST = 22.0  # inches
_BOXES = 60  # of the graph, beyond which modules are folded
_NARROW = 24  # workers, beyond which bars carry no numbers


def check_suffix(path: Path) -> None:
    """Raise ArtifactError unless `path` has a supported suffix."""
    if path.suffix.lower() not in SUFFIXES:
        suffix = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise ArtifactError(f"cannot draw {path}: it {suffix}\n    → name a file ending in {', '.join(SUFFIXES)}")


def draw_analysis(analysis: Analysis, path: Path, graph: Graph | None, fold: int | None = None) -> list[Path]:
    """Write the bars, and the graph if there is one; return the files."""
    check_suffix(path)
    content = _render(analysis, path.suffix.lower()[1:])
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror}") from error
    if graph is None:
        return [path]
    beside = path.with_name(f"{path.stem}.graph{path.suffix}")
    stage_of = {node: stage.stage for stage in analysis.stages for node in stage.nodes}
    graph.draw(beside, stage_of, fold if fold is not None else fold_for(graph, _BOXES))
    return [path, beside]


def _render(analysis: Analysis, form: str) -> bytes:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingEngineError("matplotlib", "viz", "drawing a partition") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "gemini", "font.family": "DejaVu Sans", "font.size": 9})
        listed = _list_height(analysis)
        width, bars = min(max(9.0, 2.6 + 0.88 * analysis.nparts), _WIDEST), 3.3
        height = 1.15 + bars + 0.55 + listed
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        bottom, tall = (listed + 0.55) / height, bars / height
        gap = 0.75 / width
        half = (1 - 2 * gap - 0.25 / width) / 2
        _draw_time(figure.add_axes((gap, bottom, half, tall)), analysis)
        _draw_memory(figure.add_axes((2 * gap + half, bottom, half, tall)), analysis)
        _draw_heading(figure, analysis, height)
        _draw_stage_list(figure, analysis, listed)
        content = io.BytesIO()
        undated: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=_DOTS, metadata=undated[form])
        return content.getvalue()


# ── bars ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _draw_time(axes: Axes, analysis: Analysis) -> None:
    """Draw one bar per worker: forward (light) and backward (dark) of each of its stages, stacked."""
    tallest, ideal = 0.0, _ideal_ms(analysis)
    for worker in analysis.workers:
        base = 0.0
        for at in worker.stages:
            stage = analysis.stages[at]
            _label_stage(axes, analysis, at, base)
            for ms, colour in ((stage.forward_ms, stage_colour(at)), (stage.backward_ms, darken(stage_colour(at)))):
                axes.bar(worker.worker, ms, 0.72, base, color=colour, edgecolor="white", linewidth=0.6)
                base += ms
        if worker.transfer_ms:
            axes.bar(worker.worker, worker.transfer_ms, 0.72, base, color="white", edgecolor=_FAINT, hatch="////")
            base += worker.transfer_ms
        tallest = max(tallest, base)
        _label_bar(axes, analysis, worker.worker, base, ideal)
    axes.axhline(ideal, color=_INK, linestyle=(0, (4, 3)), linewidth=1, zorder=2.5)
    _style_axes(axes, analysis, "time per batch, ms", max(tallest, ideal))
    moving = any(worker.transfer_ms for worker in analysis.workers)
    _draw_legend(axes, [("forward", _LIGHT), ("backward", _DARK)], dashed="ideal", hatched=moving)


def _ideal_ms(analysis: Analysis) -> float:
    """Return the time of every worker if work were divisible."""
    work = sum((worker.forward_ms + worker.backward_ms) * worker.speed for worker in analysis.workers)
    return work / sum(worker.speed for worker in analysis.workers)


def _draw_memory(axes: Axes, analysis: Analysis) -> None:
    unit, name = (1024.0, "GB") if analysis.memory_mb >= 4096 else (1.0, "MB")
    tallest = 0.0
    for worker in analysis.workers:
        base = 0.0
        for field, _, colour in MEMORY_PARTS:
            amount = getattr(worker.memory, field) / unit
            axes.bar(worker.worker, amount, 0.72, base, color=colour, edgecolor="white", linewidth=0.6)
            base += amount
        tallest = max(tallest, base)
        _label_bar(axes, analysis, worker.worker, base)
        if worker.limit_mb is not None:
            at = worker.limit_mb / unit
            axes.plot([worker.worker - 0.42, worker.worker + 0.42], [at, at], color=_LIMIT, linewidth=1.6)
            tallest = max(tallest, at)
    _style_axes(axes, analysis, f"peak memory, {name}", tallest)
    limited = any(worker.limit_mb is not None for worker in analysis.workers)
    _draw_legend(axes, [(label, colour) for _, label, colour in MEMORY_PARTS], line="limit" if limited else None)


def _label_bar(axes: Axes, analysis: Analysis, at: int, value: float, line: float = 0.0) -> None:
    """Write the number of a bar above it, and above a reference line that would cross the number."""
    if analysis.nparts <= _NARROW:
        text = f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
        top = line if 0.9 * line < value < line else value
        axes.annotate(
            text, (at, top), (0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=3,
        )  # fmt: skip


def _label_stage(axes: Axes, analysis: Analysis, at: int, base: float) -> None:
    """Write the number of a stage into its bar where workers have several stages and the bar is tall enough."""
    stage = analysis.stages[at]
    tallest = max(worker.forward_ms + worker.backward_ms for worker in analysis.workers)
    if not has_one_stage_per_worker(analysis) and stage.forward_ms > 0.06 * tallest and analysis.nparts <= _NARROW:
        axes.text(stage.worker, base + stage.forward_ms / 2, str(at), ha="center", va="center", fontsize=8, color=_INK)


def _style_axes(axes: Axes, analysis: Analysis, title: str, tallest: float) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=_INK, pad=24, x=-_title_offset(axes))
    axes.set_xlim(-0.6, analysis.nparts - 0.4)
    axes.set_ylim(0, tallest * 1.12 or 1)
    ticks = range(0, analysis.nparts, max(1, analysis.nparts // 24))
    axes.set_xticks(list(ticks), [f"worker {at}" if analysis.nparts <= 5 else str(at) for at in ticks])
    if analysis.nparts > 5:
        axes.set_xlabel("worker", color=_FAINT)
    axes.tick_params(length=0, colors=_FAINT)
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)


def _title_offset(axes: Axes) -> float:
    """Return the offset of titles to the left of the axes, as a share of their width, to align with tick labels."""
    return float(0.36 * axes.figure.dpi / axes.bbox.width)


def _draw_legend(
    axes: Axes,
    patches: list[tuple[str, str]],
    *,
    dashed: str | None = None,
    line: str | None = None,
    hatched: bool = False,
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour, label=label) for label, colour in patches]
    if hatched:
        handles.append(Patch(facecolor="white", edgecolor=_FAINT, hatch="////", label="transfers"))
    if dashed:
        handles.append(Line2D([], [], color=_INK, linestyle=(0, (2, 1.5)), linewidth=1, label=dashed))
    if line:
        handles.append(Line2D([], [], color=_LIMIT, linewidth=1.6, label=line))
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-_title_offset(axes), 1.0), ncols=len(handles),
        frameon=False, fontsize=7.5, handlelength=1.0, handletextpad=0.4, columnspacing=0.8, borderaxespad=0.1,
        labelcolor=_FAINT,
    )  # fmt: skip


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _draw_heading(figure: Figure, analysis: Analysis, height: float) -> None:
    left = 0.16 / figure.get_figwidth()
    title = f"{analysis.model}: {len(analysis.stages)} stages on {analysis.nparts} workers ({analysis.partitioner})"
    below = (
        f"balance {analysis.balance:.3f} · {analysis.schedule}, {analysis.micro_batches} micro-batches: "
        f"speed-up {analysis.speedup:.2f}, bubble {analysis.bubble:.0%} · {analysis.cut_mb:.3g} MB sent per step"
    )
    figure.text(left, 1 - 0.14 / height, title, fontsize=12, weight="bold", va="top", color=_INK)
    figure.text(left, 1 - 0.40 / height, below, fontsize=9, va="top", color=_FAINT)


def _columns(analysis: Analysis) -> int:
    return -(-len(analysis.stages) // _ROWS)


def _list_height(analysis: Analysis) -> float:
    return _ROW * -(-len(analysis.stages) // _columns(analysis)) + 0.12


def _draw_stage_list(figure: Figure, analysis: Analysis, listed: float) -> None:
    """Draw the stages in columns: their two colours, number and scopes."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_figwidth(), figure.get_figheight()
    columns, rows = _columns(analysis), -(-len(analysis.stages) // _columns(analysis))
    apart = (width - 0.2) / columns
    indent = 0.54 if has_one_stage_per_worker(analysis) else 0.84
    most = int((apart - indent - 0.2) / 0.066)
    for at, stage in enumerate(analysis.stages):
        left, top = 0.16 + apart * (at // rows), listed - 0.02 - _ROW * (at % rows)
        for place, colour in enumerate((stage_colour(at), darken(stage_colour(at)))):
            corner = ((left + 0.12 * place) / width, (top - 0.15) / height)
            figure.add_artist(Rectangle(corner, 0.12 / width, 0.12 / height, facecolor=colour, edgecolor="none"))
        label = f"{stage.stage}" if has_one_stage_per_worker(analysis) else f"{stage.stage} on {stage.worker}"
        text = stage.scopes if len(stage.scopes) <= most else stage.scopes[: most - 1] + "…"
        middle = (top - 0.09) / height
        figure.text((left + 0.32) / width, middle, label, fontsize=8, va="center", color=_INK)
        figure.text((left + indent) / width, middle, text, fontsize=8, va="center", color=_FAINT)


def has_one_stage_per_worker(analysis: Analysis) -> bool:
    """Return whether stage and worker numbers are equal everywhere."""
    return all(stage.stage == stage.worker for stage in analysis.stages)


# ── colours ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def stage_colour(stage: int) -> str:
    """Return the colour of a stage, as in pictures of the graph."""
    return PALETTE[stage % len(PALETTE)]


def darken(colour: str) -> str:
    """Return a darker colour of the same hue, for backward."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, light, _ = colorsys.rgb_to_hls(red, green, blue)
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.72 * light, 0.5))
