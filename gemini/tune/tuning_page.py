"""Tuning page: the result of a search as one HTML file with the ranking, the reasons and the frontier."""

from __future__ import annotations

from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.tune.step_page import load_template
from gemini.tune.step_pictures import frontier_picture, memory_picture, parts_picture, timeline_picture
from gemini.tune.step_report import duration, number, size
from gemini.tune.tuning_result import TuningResult

_ROWS = 20


def write_tuning_page(tuned: TuningResult, path: str | Path) -> Path:
    """Write the page of a search."""
    best, ranked = tuned.best, tuned.ranked[:_ROWS]
    readings = [tuned.measured.get(one.config.label()) for one in ranked]
    has_prices = best.money > 0 and len({one.config.devices for one in tuned.found}) > 1
    text = load_template("tuning.html.jinja").render(
        title=f"{tuned.request.model.name}: tuned configuration",
        tuned=tuned,
        result=best,
        ranked=ranked,
        measured=readings if any(readings) else [],
        rejected=sum(tuned.rejections.counts.values()),
        reasons=tuned.reasons(best),
        frontier=frontier_picture(tuned.found, best, tuned.frontier()),
        prices=frontier_picture(tuned.found, best, tuned.frontier("money"), "money") if has_prices else "",
        parts=parts_picture(best),
        memory=memory_picture(best),
        timeline=timeline_picture(best),
        duration=duration,
        number=number,
        size=size,
    )
    write_whole(Path(path), text)
    return Path(path)
