"""Step trace: what every worker did and when, beside the plan.

step.json     for https://ui.perfetto.dev: a slice per action, arrows along dependencies
step.png      planned above, measured below, on one time scale, from the first action of a worker
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import InvalidPlanError, MissingEngineError
from gemini.planner.step_plan import StepPlan
from gemini.runtime.pipelined.measured_schedule import TYPES
from gemini.runtime.pipelined.step_request import TraceEvent
from gemini.schedule.block import Action, Block
from gemini.schedule.export.perfetto import save_trace
from gemini.schedule.schedplan import SchedPlan, connect
from gemini.schedule.user_plan import replicas


@dataclass(frozen=True)
class ExecutedAction:
    """One action as it ran; ms since the step began."""

    worker: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class StepTrace:
    """A step that ran by a plan."""

    planned: SchedPlan
    measured: SchedPlan
    step_ms: float  # in the controller, from the request to the last gradient
    predicted_ms: float
    peak_mb: tuple[float, ...] = ()  # measured per worker; may be empty
    predicted_mb: tuple[float, ...] = ()
    profiled_ms: float = 0.0  # predicted before any step had run; 0 where equal

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they were idle."""
        return _bubble(self.measured)

    def __str__(self) -> str:
        text = f"step {self.step_ms:.1f} ms, {self.predicted_ms:.1f} predicted{self._error(self.predicted_ms)}"
        if self.profiled_ms:
            text += f", {self.profiled_ms:.1f} by the profile alone{self._error(self.profiled_ms)}"
        text += f"; bubble {self.bubble:.1%}"
        if self.peak_mb and self.predicted_mb:
            text += f"; largest worker {max(self.peak_mb):.0f} MB, {max(self.predicted_mb):.0f} predicted"
        return text

    def _error(self, expected_ms: float) -> str:
        return f" ({self.step_ms / expected_ms - 1:+.1%})" if expected_ms else ""

    # ── captions ──────────────────────────────────────────────────────────────────────────────
    @property
    def planned_title(self) -> str:
        """The title of the plan; its first figure is the end of the time axis."""
        return f"planned: {_span_text(self.planned)}, {self.predicted_ms:.1f} ms per step"

    @property
    def planned_facts(self) -> tuple[tuple[str, str], ...]:
        """The figures below the plan."""
        facts = [("bubble", f"{_bubble(self.planned):.1%}")]
        if self.profiled_ms:
            facts.append(("by the profile alone", f"{self.profiled_ms:.1f} ms"))
        if self.predicted_mb:
            facts.append(("largest worker", f"{max(self.predicted_mb):.0f} MB"))
        return tuple(facts)

    @property
    def measured_title(self) -> str:
        """The title of the measurement; its first figure is the end of the time axis."""
        return f"measured: {_span_text(self.measured)}, {self.step_ms:.1f} ms per step"

    @property
    def measured_facts(self) -> tuple[tuple[str, str], ...]:
        """The figures below the measurement."""
        inside = float(self.measured.nsteps)
        facts = [
            ("bubble", f"{self.bubble:.1%}"),
            ("before and after", f"{max(0.0, self.step_ms - inside):.1f} ms"),
        ]
        if self.predicted_ms:  # not in the title, which has the width of the picture
            facts.append(("against the plan", f"{self.step_ms / self.predicted_ms - 1:+.1%}"))
        if self.peak_mb:
            facts.append(("largest worker", f"{max(self.peak_mb):.0f} MB"))
        return tuple(facts)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the trace for Perfetto and, where matplotlib is installed, the picture."""
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        written = [save_trace(self.measured, where / "step.json")]
        try:
            written.append(draw_comparison(self, where / "step.png"))
        except MissingEngineError:
            return written
        return written


def executed_plan(plan: SchedPlan, ran: Sequence[ExecutedAction]) -> SchedPlan:
    """Return the executed actions as a plan with measured times; raises where they are not those of the plan."""
    originals = {block.action: block for block in plan}
    unplanned = [str(one.action) for one in ran if one.action not in originals]
    missing = originals.keys() - {one.action for one in ran}
    if unplanned or missing:
        raise InvalidPlanError(
            f"ran but not planned: {', '.join(unplanned[:8]) or 'nothing'}; planned but not run: "
            f"{', '.join(map(str, sorted(missing)[:8])) or 'nothing'}\n    → pass the plan of the step"
        )
    found = SchedPlan(plan.ndevs)
    found.placement = plan.placement
    twins: dict[Block, Block] = {}
    for one in sorted(ran, key=lambda one: one.begin):
        block = originals[one.action]
        span = max(one.end - one.begin, 1e-6)
        twins[block] = Block(block.mid, span, block.memory, block.btype, stage=block.stage, gid=block.gid)
        found.add_block(twins[block], plan.device(block), max(one.begin, 0.0))
    connect(twins)
    return found


def build_trace(
    plan: StepPlan, events: Sequence[TraceEvent], step_ms: float, peak_mb: tuple[float, ...] = ()
) -> StepTrace:
    """Return the timeline of a step beside its prediction; `peak_mb`: measured per worker, where known."""
    # All shards of a stage run an action together: the first stands for them.
    done = [event for event in events if event.kind in TYPES and event.worker % plan.shard_count == 0]
    done = list({(one.stage, one.kind, one.mid): one for one in reversed(done)}.values())[::-1]
    first = min(event.begin for event in done)
    copies = replicas(plan.schedule)  # a micro-batch of the schedule is one per replica here
    ran = [
        ExecutedAction(
            event.worker // plan.shard_count,
            Action(event.stage + event.mid % copies * plan.nstages, TYPES[event.kind], event.mid // copies),
            (event.begin - first) * 1e3,
            (event.end - first) * 1e3,
        )
        for event in done
    ]
    profiled_ms = 0.0 if plan.measured is None else plan.analysis.step_ms
    measured = executed_plan(plan.schedule, ran)
    expected_mb = tuple(one.memory.total_mb - one.memory.optimizer_mb for one in plan.analysis.workers)
    return StepTrace(plan.expected, measured, step_ms, plan.step_ms, peak_mb, expected_mb, profiled_ms)


def _span_text(plan: SchedPlan) -> str:
    return f"{float(plan.nsteps):.1f} ms from first action to last"


def _bubble(plan: SchedPlan) -> float:
    busy = sum(block.span for block in plan)
    return 1 - float(busy) / (float(plan.nsteps) * plan.ndevs) if len(plan) else 0.0


def draw_comparison(trace: StepTrace, path: Path) -> Path:
    """Draw planned and measured, one above the other, on one time scale."""
    try:
        import matplotlib.image
        import numpy as np
    except ImportError as error:
        raise MissingEngineError("matplotlib", "viz", "drawing a step") from error
    from gemini.schedule.draw.figure import render_figure
    from gemini.schedule.draw.figure_layout import lay_out
    from gemini.schedule.draw.timeline import timeline

    end = max(trace.planned.nsteps, trace.measured.nsteps)
    planned, measured = timeline(trace.planned, trace.planned_title), timeline(trace.measured, trace.measured_title)
    timelines = [
        replace(planned, end=end, phases=None, units=("ms", "MB"), row_name="worker", facts=trace.planned_facts),
        # Memory is not measured per action: the plan's curve under measured times would suggest it.
        replace(
            measured, end=end, phases=None, units=("ms", "MB"), row_name="worker", facts=trace.measured_facts,
            shows_memory=False,
        ),
    ]  # fmt: skip
    scale = max(lay_out(one).axis_width for one in timelines)
    pictures = [
        matplotlib.image.imread(io.BytesIO(render_figure(one, "png", scale)), format="png") for one in timelines
    ]
    width = max(picture.shape[1] for picture in pictures)
    padded = [
        np.pad(picture, ((0, 0), (0, width - picture.shape[1]), (0, 0)), constant_values=1.0) for picture in pictures
    ]
    content = io.BytesIO()
    matplotlib.image.imsave(content, np.concatenate(padded), format="png")
    write_whole(path, content.getvalue())
    return path
