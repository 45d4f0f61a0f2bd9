"""Step traces: the measured steps of a run for https://ui.perfetto.dev, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import ArtifactError
from gemini.report.journal_reader import read_run
from gemini.report.recorded_plan import RecordedPlan, read_recorded_plan

Event = dict[str, object]
_GAP_MS = 0.2  # between two steps: other work of the script is not recorded


def write_step_traces(folder: Path, target: Path) -> int:
    """Write the recorded steps of all models of the last run; return how many. Raises ArtifactError."""
    events: list[Event] = []
    count = 0
    for process, model in enumerate(read_run(folder).models, 1):
        plan = read_recorded_plan(folder, model)
        if plan is not None:
            events += trace_events(plan, process, model.model)
            count += len(plan.measured)
    if not count:
        raise ArtifactError(f"{folder} has no measured step\n    → train with workers: gemini_python --mode pipeline …")
    lines = ",\n".join(json.dumps(event) for event in events)
    write_whole(target, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')
    return count


def trace_events(plan: RecordedPlan, process: int, name: str) -> Iterator[Event]:
    """Yield the events of the recorded steps of a model: a track per worker, and one for the steps."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "thread_name", "args": {"name": "steps"}}
    for worker in range(plan.workers):
        label = {"name": f"worker {worker}"}
        yield {"ph": "M", "pid": process, "tid": worker + 1, "name": "thread_name", "args": label}
    begin, first = 0.0, plan.step - len(plan.measured) + 1
    for number, step in enumerate(plan.measured, first):
        yield _slice(f"step {number}", "step", process, 0, begin, step.ms)
        for one in step.actions:
            made = _slice(f"{one.stage}{one.letter}{one.mid}", one.letter, process, one.worker + 1,
                          begin + one.begin, one.span)  # fmt: skip
            yield {**made, "args": {"stage": one.stage, "micro-batch": one.mid}}
        begin += max(step.ms, max((one.end for one in step.actions), default=0.0)) + _GAP_MS


def _slice(name: str, category: str, process: int, thread: int, begin: float, span: float) -> Event:  # noqa: PLR0917
    where = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category}
    return {**where, "ts": round(begin * 1e3, 1), "dur": round(span * 1e3, 1)}
