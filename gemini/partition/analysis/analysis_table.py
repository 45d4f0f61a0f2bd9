"""Tables of an analysis and of a comparison, as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemini.partition.analysis.analysis_result import Analysis, MemoryEstimate, StageAnalysis, WorkerAnalysis
    from gemini.partition.partitioner_comparison import Comparison, ComparisonRow

PLAIN_WIDTH = 160
_BESIDE = 140  # terminal columns from which scopes fit beside the numbers, not below
_LEAST = 104  # terminal columns of the numbers alone
_STAGE = (
    "forward\nms", "backward\nms", "params", "weights\nMB", "grads\nMB", "optim\nMB", "activ\nMB", "work\nMB",
    "peak\nMB", "in\nMB", "out\nMB", "worker\nchanges",
)  # fmt: skip
_WORKER = ("stages", "forward\nms", "backward\nms", "transfers\nms", "÷ ideal", "idle\n%", "peak\nMB", "limit\nMB")
_COMPARED = (
    "÷ ideal", "cut\nMB", "stages", "worker\nchanges", "peak\nMB", "speed-up", "bubble\n%", "seconds",
)  # fmt: skip


# ── one partition ────────────────────────────────────────────────────────────────────────────────────────────────────
def analysis_text(analysis: Analysis) -> str:
    """Return the tables of stages and (where they differ) workers, then the totals."""
    beside = _width() >= _BESIDE
    stages = _table("stage", _STAGE, "scopes" if beside else None)
    for stage in analysis.stages:
        row = _stage_row(stage, analysis)
        stages.add_row(*(row if beside else row[:-1]))
    parts: list[Any] = [stages]
    if not beside:
        scopes = _table("stage", (), "scopes")
        for stage in analysis.stages:
            scopes.add_row(_stage_row(stage, analysis)[0], stage.scopes)
        parts.append(scopes)
    if _workers_differ(analysis):
        workers = _table("worker", _WORKER)
        for worker in analysis.workers:
            workers.add_row(*_worker_row(worker, analysis), style=None if worker.fits else "red")
        parts.append(workers)
    return "\n".join([_render(parts), *_summary_lines(analysis)])


def _workers_differ(analysis: Analysis) -> bool:
    several = any(len(worker.stages) != 1 for worker in analysis.workers)
    return several or any(worker.speed != 1 or worker.limit_mb is not None for worker in analysis.workers)


def _stage_row(stage: StageAnalysis, analysis: Analysis) -> list[str]:
    name = f"{stage.stage}" if stage.stage == stage.worker and not _workers_differ(analysis) else (
        f"{stage.stage} on {stage.worker}"
    )  # fmt: skip
    mark = "*" if stage.shared else ""
    memory: MemoryEstimate = stage.memory
    return [
        name, f"{stage.forward_ms:.2f}", f"{stage.backward_ms:.2f}", f"{count_text(stage.parameters)}{mark}",
        *map(size_text, (
            memory.weights_mb, memory.gradients_mb, memory.optimizer_mb, memory.activations_mb, memory.working_mb,
            memory.total_mb, stage.in_mb + stage.returned_mb, stage.out_mb + stage.sent_back_mb,
        )),
        f"{stage.hops}", stage.scopes,
    ]  # fmt: skip


def _worker_row(worker: WorkerAnalysis, analysis: Analysis) -> list[str]:
    load = worker.busy_ms / analysis.ideal_ms if analysis.ideal_ms else 1.0
    limit = "–" if worker.limit_mb is None else size_text(worker.limit_mb)
    return [
        f"{worker.worker}" + (f" (×{worker.speed:g})" if worker.speed != 1 else ""),
        " ".join(map(str, worker.stages)) or "none", f"{worker.forward_ms:.2f}", f"{worker.backward_ms:.2f}",
        f"{worker.transfer_ms:.2f}", f"{load:.3f}", f"{100 * worker.idle:.1f}",
        size_text(worker.memory.total_mb) + ("" if worker.fits else " !"), limit,
    ]  # fmt: skip


def _summary_lines(analysis: Analysis) -> list[str]:
    single = "one worker" if len({worker.speed for worker in analysis.workers}) == 1 else "the fastest worker"
    lines = [
        f"{analysis.model} in {len(analysis.stages)} stages on {analysis.nparts} workers ({analysis.partitioner}; "
        f"times on {analysis.device})",
        f"balance {analysis.balance:.3f} (slowest worker ÷ ideal of {analysis.ideal_ms:.2f} ms), "
        f"{analysis.cut_mb:.2f} MB sent per step, {analysis.hops} worker change{'' if analysis.hops == 1 else 's'}",
        f"{analysis.schedule} with {analysis.micro_batches} micro-batches: step {analysis.step_ms:.2f} ms "
        f"({single}: {analysis.single_ms:.2f} ms), speed-up {analysis.speedup:.2f}, bubble {analysis.bubble:.1%}",
    ]
    over = [worker for worker in analysis.workers if not worker.fits]
    for worker in over:
        excess = worker.memory.total_mb - (worker.limit_mb or 0.0)
        lines.append(f"! worker {worker.worker} is {excess:.1f} MB over its limit of {worker.limit_mb:.1f} MB")
    return [*lines, *analysis.notes]


def size_text(mb: float) -> str:
    """Format megabytes with three significant digits."""
    return f"{mb:.0f}" if mb >= 99.95 else f"{mb:.1f}" if mb >= 9.995 else f"{mb:.2f}"


def count_text(count: int) -> str:
    """Format a number of elements with a unit: 335.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


# ── comparison ───────────────────────────────────────────────────────────────────────────────────────────────────────
def comparison_text(comparison: Comparison) -> str:
    """Return one row per partitioner, best balance first; failed ones last, with the reason."""
    table = _table("partitioner", _COMPARED)
    for row in comparison.rows:
        if row.analysis is not None:
            best = comparison.best is not None and row.name == comparison.best.name
            table.add_row(*_comparison_row(row, row.analysis), style="bold green" if best else None)
    failed = [f"{row.name}: {_first_line(row.reason)}" for row in comparison.rows if row.analysis is None]
    some = next((row.analysis for row in comparison.rows if row.analysis is not None), None)
    lines = [] if some is None else [
        f"{comparison.model} on {comparison.nparts} workers, {some.micro_batches} micro-batches; ideal "
        f"{some.ideal_ms:.2f} ms per worker"
    ]  # fmt: skip
    notes: dict[str, list[str]] = {}  # equal notes are listed once
    for row in comparison.rows:
        for note in row.analysis.notes if row.analysis is not None else ():
            notes.setdefault(note, []).append(row.name)
    noted = [f"{', '.join(names)}: {note}" for note, names in notes.items() if not note.startswith("*")]
    shown = [_render([table])] if some is not None else []
    return "\n".join([*shown, *lines, *(f"failed: {line}" for line in failed), *noted])


def _comparison_row(row: ComparisonRow, analysis: Analysis) -> list[str]:
    return [
        row.name, f"{analysis.balance:.3f}", size_text(analysis.cut_mb), str(len(analysis.stages)), str(analysis.hops),
        size_text(analysis.memory_mb) + ("" if analysis.fits else " !"), f"{analysis.speedup:.2f}",
        f"{100 * analysis.bubble:.1f}", f"{row.seconds:.2f}",
    ]  # fmt: skip


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


# ── rich ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _table(first: str, headings: Sequence[str], last: str | None = None) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def _width() -> int:
    """Return the terminal width, at least that of the numbers; a fixed width where output is no terminal."""
    from rich.console import Console

    return max(Console().width, _LEAST) if sys.stdout.isatty() else PLAIN_WIDTH


def _render(parts: Sequence[Any]) -> str:
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=_width(), force_terminal=sys.stdout.isatty(), highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
