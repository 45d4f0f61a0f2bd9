"""Report page: a recorded run as one HTML file, without scripts or pictures from elsewhere.

Sections per model: paths and reasons, predicted against measured, planned against measured timeline, workers, stages
and the folded graph; then the annotated source, the environment and the command that repeats the run.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.atomic_files import write_whole
from gemini.errors import MissingEngineError
from gemini.report.annotated_source import AnnotatedProgram, annotate
from gemini.report.journal_reader import RecordedRun, read_run
from gemini.report.line_chart import line_chart, path_strip
from gemini.report.recorded_plan import RecordedPlan, idle_share, read_recorded_plan
from gemini.report.scope_tree import ScopeTree, fold_by_scope
from gemini.report.timeline_svg import timeline_svg
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.run_journal import ModelJournal
from gemini.schedule.draw import palette

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).parent / "templates" / "report.html.jinja"
_MEMORY = ("weights", "gradients", "activations", "working", "transfers", "libraries")
PATH_NAMES = {path.value: f"path{at}" for at, path in enumerate(CallPath)}


@dataclass(frozen=True)
class Comparison:
    """A figure that was predicted and measured."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str

    @property
    def error(self) -> str:
        """The relative difference; '' where one is unknown."""
        if not self.predicted or self.measured is None or self.unit == "%":
            return ""
        return f"{self.measured / self.predicted - 1:+.0%}"


@dataclass(frozen=True)
class WorkerRow:
    """One worker: planned and measured busy time (ms) and memory (MB)."""

    worker: int
    stages: tuple[int, ...]
    planned_ms: float
    measured_ms: float
    memory: tuple[tuple[str, float], ...]  # planned, by purpose
    planned_mb: float
    measured_mb: float | None


@dataclass(frozen=True)
class ModelSection:
    """Everything the page shows of one model."""

    journal: ModelJournal
    plan: RecordedPlan | None
    paths: list[tuple[str, str, int]]  # class in the style sheet, name, calls
    strip: str
    times: str
    losses: str
    comparisons: list[Comparison]
    planned: str
    measured: str
    workers: list[WorkerRow]
    tree: ScopeTree | None
    memory_note: str


def write_report(folder: Path, target: Path) -> Path:
    """Write the page of the last run in a run folder; raises ArtifactError."""
    write_whole(target, render_report(read_run(folder), folder))
    return target


def render_report(run: RecordedRun, folder: Path) -> str:
    """Return the page of a run."""
    template = load_template()
    sections = [_section(model, read_recorded_plan(folder, model), at) for at, model in enumerate(run.models)]
    page: str = template.render(
        run=run,
        sections=sections,
        program=annotate(run.program, _site_times(run))
        if run.program["file"]
        else AnnotatedProgram(note="the program is no file"),
        command=repeat_command(run),
        ended=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.time)),
        seconds=run.time - run.program["began"],
        stage_colour=lambda stage: palette.MICRO_BATCHES[stage % len(palette.MICRO_BATCHES)][1],
        stage_light=lambda stage: palette.MICRO_BATCHES[stage % len(palette.MICRO_BATCHES)][0],
        neutral=palette.NEUTRAL,
    )
    return page


def _site_times(run: RecordedRun) -> dict[str, tuple[str, float]]:
    return {site: entry for model in run.models for site, entry in model.sites.items()}


def load_template() -> Template:
    """Return the template; raises MissingEngineError without jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise MissingEngineError("jinja2", "report", "a report page") from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(TEMPLATE.name)


def repeat_command(run: RecordedRun) -> str:
    """Return the shell command that runs the program again with these settings."""
    settings: dict[str, Any] = next((model.settings for model in run.models if model.settings), {})
    flags: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "report" or (name == "run_folder" and Path(value) == Path(run.program["folder"], ".gemini")):
            continue
        flags += [flag] if value is True else [] if value is False else [flag, _flag_text(value)]
    program = run.program
    module = program["module"].removesuffix(".__main__")
    is_module = bool(module) and module != "__main__"
    target = ["-m", module] if is_module else [program["file"] or "-"]
    return f"cd {shlex.quote(program['folder'])}\n" + shlex.join(
        ["gemini_python", *flags, *target, *program["arguments"]]
    )


def _flag_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _section(model: ModelJournal, plan: RecordedPlan | None, number: int) -> ModelSection:
    history = model.history
    paths = [(PATH_NAMES[path], path.label, model.steps[path]) for path in CallPath if model.steps.get(path)]
    times = [(at * history.size, one.total_ms / one.timed) for at, one in enumerate(history.buckets) if one.timed]
    losses = [(at * history.size, one.loss) for at, one in enumerate(history.buckets) if one.loss is not None]
    marks = [(call, f"compared: loss {loss:.1e}, gradients {grad:.1e}") for call, loss, grad in model.verified]
    planned = measured = ""
    if plan is not None:
        end = max((action.end for action in (*plan.planned, *plan.last.actions)), default=0.0)
        planned = timeline_svg(plan.planned, plan.workers, end, f"planned{number}")
        measured = timeline_svg(plan.last.actions, plan.workers, end, f"measured{number}")
    return ModelSection(
        journal=model,
        plan=plan,
        paths=paths,
        strip=_strip(model),
        times=line_chart(times, history.calls, f"time per step of {number}", "ms"),
        losses=line_chart(losses, history.calls, f"losses of {number}", "", marks),
        comparisons=[] if plan is None else _comparisons(plan, model),
        planned=planned,
        measured=measured,
        workers=[] if plan is None else _workers(plan),
        tree=None if plan is None else fold_by_scope(model.model, plan.nodes),
        memory_note="" if plan is None else _memory_note(plan),
    )


def _strip(model: ModelJournal) -> str:
    history = model.history
    shares = []
    for at, bucket in enumerate(history.buckets):
        count = sum(bucket.counts.values())
        by_path: dict[str, int] = {}
        for kind, many in bucket.counts.items():
            path = PATH_NAMES[history.kinds[kind][0]]
            by_path[path] = by_path.get(path, 0) + many
        shares.append(
            (float(at * history.size), float(count), [(css, n / count) for css, n in sorted(by_path.items())])
        )
    return path_strip(shares, history.calls)


def _comparisons(plan: RecordedPlan, model: ModelJournal) -> list[Comparison]:
    rows = [
        Comparison("step, by the profile alone", plan.profiled_ms, model.step_ms or plan.last.ms, "ms"),
        Comparison("step, corrected by measured steps", plan.predicted_ms, model.step_ms or plan.last.ms, "ms"),
        Comparison(
            "idle, first to last action", idle_share(plan.planned, plan.workers) * 100,
            idle_share(plan.last.actions, plan.workers) * 100, "%",
        ),
        Comparison("largest worker", _expected_mb(plan), max(plan.peak_mb, default=None), "MB"),
    ]  # fmt: skip
    if model.local_ms and not model.sizes_differ:
        rows.append(Comparison("step on one device", plan.analysis.single_ms, model.local_ms, "ms"))
    return rows


def _expected_mb(plan: RecordedPlan) -> float:
    """Return the planned memory of the largest worker, without optimizer state, which the script's process holds."""
    return max(memory.total_mb for memory in plan.memory)


def _workers(plan: RecordedPlan) -> list[WorkerRow]:
    return [
        WorkerRow(
            worker,
            plan.stages_of(worker),
            sum(action.span for action in plan.planned if action.worker == worker),
            sum(action.span for action in plan.last.actions if action.worker == worker),
            tuple((name, size) for name in _MEMORY if (size := getattr(memory, f"{name}_mb")) > 0),
            memory.total_mb,
            plan.peak_mb[worker] if worker < len(plan.peak_mb) else None,
        )
        for worker, memory in enumerate(plan.memory)
    ]


def _memory_note(plan: RecordedPlan) -> str:
    state = sum(one.memory.optimizer_mb for one in plan.analysis.workers)
    if state < 1:
        return ""
    return (
        f"Optimizer state, up to {state:.0f} MB for a usual Adam, is in the process of the script, which runs "
        "optimizer.step(); it is not part of the workers' memory."
    )
