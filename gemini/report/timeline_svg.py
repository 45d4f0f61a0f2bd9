"""Timeline pictures: the actions of a step as SVG, a row per worker, idle time hatched.

Blocks of one colour are one path, so that a step of 64 workers and 10,000 actions stays small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gemini.report.recorded_plan import Action
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, LETTERS, WEIGHT_GRADIENT
from gemini.schedule.draw import palette

WIDTH, LEFT, AXIS = 1120, 44, 22
_LABELS = 3000  # at most
_BLOCKS = 40_000  # drawn at most; the rest of a step is cut off
_TYPES = {LETTERS[btype]: btype for btype in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)}


def timeline_svg(actions: Sequence[Action], workers: int, end: float, name: str) -> str:
    """Draw actions from 0 to `end` ms; `name` describes the picture and is unique in the page."""
    row = 26 if workers <= 8 else 18 if workers <= 24 else 12
    height = workers * row + AXIS
    scale = (WIDTH - LEFT - 4) / (end or 1.0)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">',
        f'<defs><pattern id="{name}-idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{palette.IDLE}"/>'
        f'<line x1="0" y1="0" x2="0" y2="6" stroke="{palette.IDLE_HATCH}" stroke-width="2"/></pattern></defs>',
    ]
    shown = sorted(actions, key=lambda action: action.begin)[:_BLOCKS]
    last = max((action.end for action in shown), default=0.0)
    for worker in range(workers):
        top = worker * row
        parts.append(f'<text class="row" x="{LEFT - 6}" y="{top + row / 2 + 4:.0f}" text-anchor="end">w{worker}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top + 1}" width="{last * scale:.1f}" height="{row - 2}" fill="url(#{name}-idle)"/>'
        )
    parts += _blocks(shown, row, scale)
    parts += _axis(end, scale, workers * row)
    return "".join([*parts, "</svg>"])


def _blocks(actions: Sequence[Action], row: int, scale: float) -> list[str]:
    paths: dict[str, list[str]] = defaultdict(list)
    labels: list[str] = []
    for action in actions:
        shade = palette.SHADES.get(_TYPES.get(action.letter, ""), palette.MIDDLE)
        x, width = LEFT + action.begin * scale, max(action.span * scale, 0.3)
        top = action.worker * row + 1
        paths[palette.fill(action.mid, shade)].append(f"M{x:.1f} {top}h{width:.1f}v{row - 2}h-{width:.1f}z")
        if width > 9 + 6 * len(str(action.mid)) and len(labels) < _LABELS and row > 12:
            labels.append(
                f'<text class="block" x="{x + width / 2:.1f}" y="{top + row / 2 + 3:.0f}" '
                f'fill="{palette.ink(shade)}">{action.letter}{action.mid}</text>'
            )
    blocks = [
        f'<path d="{"".join(shapes)}" fill="{colour}" stroke="#fff" stroke-width=".5"/>'
        for colour, shapes in paths.items()
    ]
    return blocks + labels


def _axis(end: float, scale: float, top: int) -> list[str]:
    step = tick_step(end)
    parts = [f'<line class="axis" x1="{LEFT}" y1="{top}" x2="{WIDTH - 4}" y2="{top}"/>']
    for tick in range(int(end / step) + 1):
        x = LEFT + tick * step * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}"/>')
        unit = " ms" if tick == 0 else ""
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top + 16}">{tick * step:g}{unit}</text>')
    return parts


def tick_step(end: float, most: int = 10) -> float:
    """Return a round distance of at most `most` ticks up to `end`."""
    if end <= 0:
        return 1.0
    size: float = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if end / (size * factor) <= most:
                return size * factor
        size *= 10
