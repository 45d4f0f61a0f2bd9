"""Step page: a predicted step as one HTML file with pictures, without scripts or files from elsewhere."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.atomic_files import write_whole
from gemini.errors import MissingEngineError
from gemini.tune.stage_costs import StageCost
from gemini.tune.step_pictures import memory_picture, parts_picture, timeline_picture
from gemini.tune.step_report import duration, number, size
from gemini.tune.step_simulation import StepResult

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"


def write_step_page(result: StepResult, path: str | Path) -> Path:
    """Write the page of one prediction."""
    plan = result.run.plan
    text = load_template("step.html.jinja").render(
        title=f"{result.model}: predicted step",
        result=result,
        unit="samples" if result.tokens == result.config.batch else "tokens",
        parts=parts_picture(result),
        memory=memory_picture(result),
        timeline=timeline_picture(result),
        split=plan is not None and any(block.btype == "weight_gradient" for block in plan.device_blocks(0)),
        stages=group_stages(result.stages),
        config=result.config.to_dict(),
        duration=duration,
        number=number,
        size=size,
    )
    write_whole(Path(path), text)
    return Path(path)


def load_template(name: str) -> Template:
    """Return a template of this package."""
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise MissingEngineError("jinja2", "report", "writing a page") from None
    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True).get_template(name)


def group_stages(stages: tuple[StageCost, ...]) -> list[tuple[int, int, StageCost]]:
    """Return (first, last, stage) of equal neighbours."""
    found = []
    for _, held in groupby(enumerate(stages), key=lambda pair: id(pair[1])):
        group = list(held)
        found.append((group[0][0], group[-1][0], group[0][1]))
    return found
