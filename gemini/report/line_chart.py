"""Line charts of a run: one value per bucket of calls, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gemini.report.timeline_svg import AXIS, WIDTH, tick_step

_LEFT, _HEIGHT = 70, 150
Marks = Sequence[tuple[float, str]]


def line_chart(values: Sequence[tuple[float, float]], calls: int, name: str, unit: str, marks: Marks = ()) -> str:
    """Draw (call, value) points over the calls of a run; `marks` are calls with a text."""
    points = [(at, value) for at, value in values if math.isfinite(value)]
    if not points:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = 0.0 if low >= 0 and low < 0.6 * high else low
    step = tick_step(high - low or abs(high) or 1.0, 4)
    low, high = math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step
    across = (WIDTH - _LEFT - 10) / max(calls - 1, 1)
    up = (_HEIGHT - 12) / (high - low)

    def place(at: float, value: float) -> str:
        return f"{_LEFT + at * across:.1f},{_HEIGHT - (value - low) * up:.1f}"

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {_HEIGHT + AXIS}" role="img" aria-label="{name}">']
    for tick in range(round((high - low) / step) + 1):
        y = _HEIGHT - tick * step * up
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - 10}" y2="{y:.1f}"/>')
        label = f"{low + tick * step:.4g}" + (f" {unit}" if unit else "")
        parts.append(f'<text class="row" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for at, text in marks:
        x = _LEFT + at * across
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="8" x2="{x:.1f}" y2="{_HEIGHT}"><title>{text}</title></line>')
    parts.append(f'<polyline class="line" points="{" ".join(place(*point) for point in points)}"/>')
    if len(points) <= 60:
        parts += [_dot(place(*point), point[1]) for point in points]
    parts += _call_axis(calls, across)
    return "".join([*parts, "</svg>"])


def _dot(place: str, value: float) -> str:
    x, y = place.split(",")
    return f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"><title>{value:.6g}</title></circle>'


def _call_axis(calls: int, across: float) -> list[str]:
    step = max(1, round(tick_step(max(calls - 1, 1))))
    parts = []
    for call in range(0, calls, step):
        text = f"call {call}" if call == 0 else f"{call}"
        x = _LEFT + call * across
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT + 16}">{text}</text>')
    return parts


def path_strip(shares: Sequence[tuple[float, float, Sequence[tuple[str, float]]]], calls: int) -> str:
    """Draw which share of the calls of each bucket took which path: (first call, calls, [(css class, share)])."""
    height, across = 34, (WIDTH - _LEFT - 10) / max(calls, 1)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height + 4}" role="img" aria-label="paths of the calls">']
    overlap = 0.6 if len(shares) > 64 else 0.0  # no lines between many buckets
    for first, count, paths in shares:
        top = 2.0
        for css, share in paths:
            part = share * height
            parts.append(
                f'<rect class="{css}" x="{_LEFT + first * across:.2f}" y="{top:.1f}" '
                f'width="{max(count * across + overlap, 0.4):.2f}" height="{part:.1f}"/>'
            )
            top += part
    return "".join([*parts, "</svg>"])
