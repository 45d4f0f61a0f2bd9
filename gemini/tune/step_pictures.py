"""Step pictures: parts of a step, memory of a device, timeline of the stages and the frontier of a search, as SVG.

parts      ▇▇▇▇▇▇▇▇▇▇▇ computation ▇▇ tensor ░ bubble ▇ gradients
memory     ▇▇ weights ▇▇▇ gradients ▇▇▇▇▇▇ activations          ┆ capacity
timeline   stage 0  F F F F B F B F B …
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gemini.errors import MissingEngineError
from gemini.tune.step_report import PART_NAMES, duration, size
from gemini.tune.step_simulation import StepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_COLOURS = {
    "compute": "#2f6f9f", "recompute": "#86b4d6", "tensor": "#d9822b", "context": "#e8b04a", "expert": "#b5651d",
    "data": "#8a63a8", "pipeline": "#5c9e6e", "bubble": "#c9d1d9", "gradients": "#a94468", "optimizer": "#4c5a67",
    "controller": "#7a6a53",
}  # fmt: skip
MEMORY_COLOURS = {
    "weights": "#3d6fa8", "gradients": "#7fb2e5", "optimizer": "#c3d5e8", "gathered": "#8a63a8", "buffers": "#5c9e6e",
    "activations": "#e8a13c", "working set": "#f3d7a6", "margin": "#d0d7de",
}  # fmt: skip
_BLOCKS = {"forward": "#61a1f0", "backward": "#08a88c", "input_gradient": "#08a88c", "weight_gradient": "#b7d36b"}
_INK, _FAINT, _LIMIT = "#1f2328", "#656d76", "#b3261e"
_STAGES, _SLICES = 32, 4000  # shown in the timeline
_EDGES = 40.0  # points of white between the blocks of a stage, at most


def parts_picture(result: StepResult) -> str:
    """Return a bar with the parts of the step of the busiest device."""
    shown = [(name, value) for name, value in result.parts.items() if value / result.seconds >= 1e-3]
    return _stacked(
        [(PART_NAMES[name], value, PART_COLOURS[name], f"{value / result.seconds:.1%}") for name, value in shown],
        "milliseconds", 1e3,
    )  # fmt: skip


def memory_picture(result: StepResult) -> str:
    """Return a bar with what holds the memory, and the capacity."""
    rows = [(name, nbytes, MEMORY_COLOURS[name], size(nbytes)) for name, nbytes in result.memory.rows]
    return _stacked(rows, "GiB", 1 / 2**30, limit=result.memory.capacity)


def _stacked(rows: Sequence[tuple[str, float, str, str]], unit: str, factor: float, limit: float = 0.0) -> str:
    plot = _pyplot(f"drawing {unit}")
    figure, axes = plot.subplots(figsize=(9.4, 0.75 + 0.23 * ((len(rows) + 1) // 2)))
    left = 0.0
    for name, value, colour, note in rows:
        axes.barh(0, value * factor, left=left * factor, height=0.6, color=colour, label=f"{name}  {note}")
        left += value
    if limit:
        axes.axvline(limit * factor, color=_LIMIT, linewidth=1.4, linestyle="--", label=f"capacity  {size(limit)}")
    axes.set_xlim(0, max(left, limit) * factor * 1.02)
    axes.set_yticks([])
    axes.set_xlabel(unit, color=_FAINT, fontsize=9)
    _bare(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=2, frameon=False, fontsize=9)
    return _svg(figure, plot)


def timeline_picture(result: StepResult) -> str:
    """Return the blocks of the schedule on the stages; '' without a pipeline."""
    plan = result.run.plan
    if plan is None:
        return ""
    plot = _pyplot("drawing a timeline")
    count = min(plan.ndevs, _STAGES)
    figure, axes = plot.subplots(figsize=(9.4, 0.9 + 0.2 * count))
    horizon = plan.nsteps
    per_stage = max(len(plan.device_blocks(device)) for device in range(count))
    if per_stage * count > _SLICES:  # the beginning, at a scale at which blocks can be seen
        horizon *= _SLICES / (per_stage * count)
    for device in range(count):
        edge = min(0.25, _EDGES / max(1, len(plan.device_blocks(device))))
        for btype, colour in _BLOCKS.items():
            spans = [
                (plan.step(block), block.span)
                for block in plan.device_blocks(device)
                if block.btype == btype and plan.step(block) < horizon
            ]
            axes.broken_barh(spans, (device - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=edge)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, horizon)
    axes.set_yticks(range(0, count, max(1, count // 8)))
    axes.set_ylabel("stage", color=_FAINT, fontsize=9)
    axes.set_xlabel("milliseconds", color=_FAINT, fontsize=9)
    _bare(axes)
    return _svg(figure, plot)


def frontier_picture(
    results: Sequence[StepResult], chosen: StepResult, frontier: Sequence[StepResult], axis: str = "memory"
) -> str:
    """Return time against memory (or money) of a search, with those that no other one beats in both."""
    plot = _pyplot("drawing the frontier")
    figure, axes = plot.subplots(figsize=(9.4, 4.2))

    def amount(one: StepResult) -> float:
        return one.money if axis == "money" else one.memory.total / 2**30

    axes.scatter(
        list(map(amount, results)), [one.seconds for one in results], s=9, color="#b6c2cf",
        label="configurations that fit", linewidths=0,
    )  # fmt: skip
    line = sorted(frontier, key=amount)
    axes.step(
        list(map(amount, line)), [one.seconds for one in line], where="post", color="#2f6f9f", linewidth=1.3,
        marker="o", markersize=4, label=f"frontier: no other is faster with as much {axis}",
    )  # fmt: skip
    axes.scatter(
        [amount(chosen)], [chosen.seconds], s=90, marker="*", color=_LIMIT, zorder=5,
        label=f"chosen: {duration(chosen.seconds)}",
    )  # fmt: skip
    if axis == "memory":
        capacity = chosen.memory.capacity / 2**30
        axes.axvline(capacity, color=_LIMIT, linewidth=1, linestyle="--", label="memory of a device")
    else:
        least = min(map(amount, results))
        axes.set_xlim(least * 0.93, min(max(map(amount, results)) * 1.03, least * 4))
    fastest = min(one.seconds for one in results)
    slowest = max(one.seconds for one in (*line, chosen))
    axes.set_ylim(fastest * 0.93, min(max(one.seconds for one in results) * 1.03, max(fastest * 3, slowest * 1.1)))
    axes.set_xlabel("price of a step" if axis == "money" else "memory of a device, GiB", color=_FAINT, fontsize=9)
    axes.set_ylabel("step, seconds", color=_FAINT, fontsize=9)
    _bare(axes)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9, fontsize=9, loc="upper right")
    return _svg(figure, plot)


def _pyplot(purpose: str) -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingEngineError("matplotlib", "report", purpose) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    return plot


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, colors=_INK, length=3)


def _svg(figure: Any, plot: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True)
    plot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
