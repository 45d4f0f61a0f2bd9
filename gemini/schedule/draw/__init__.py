"""Pictures of schedules: PNG, SVG and PDF through matplotlib, and a page of HTML to zoom in."""

from __future__ import annotations

from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import ScheduleError
from gemini.schedule.draw.timeline import timeline
from gemini.schedule.schedplan import SchedPlan

__all__ = ["SUFFIXES", "check_suffix", "draw"]

SUFFIXES = (".png", ".svg", ".pdf", ".html")


def draw(plan: SchedPlan, path: str | Path, *, title: str | None = None) -> Path:
    """Draw `plan` into `path`; its suffix chooses the format (`SUFFIXES`).

    Devices are rows, colours are micro-batches, light is forward, middle is backward and dark is weight gradient.
    The memory of the device with its limit is below each row; idle time is hatched; warm-up, repetend and
    cool-down are labelled above.
    """
    suffix = check_suffix(path)
    picture = timeline(plan, title)
    if suffix == ".html":
        from gemini.schedule.draw.html_page import render_page

        content: str | bytes = render_page(picture)
    else:
        from gemini.schedule.draw.figure import render_figure

        content = render_figure(picture, suffix[1:])
    write_whole(Path(path), content)
    return Path(path)


def check_suffix(path: str | Path) -> str:
    """The suffix of `path` if pictures can have it, else raise an error that lists the valid ones."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ScheduleError(
            f"cannot draw {path}: the suffix {suffix!r} is no picture format\n    → use one of {', '.join(SUFFIXES)}"
        )
    return suffix
