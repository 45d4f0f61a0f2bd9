"""Run summary on standard error: the model and its plan after the first step by it, and a line per model at the end.

A plan is shown only when a step has run by it: before, it is not certain that any will.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.memory_summary import memory_rows
from gemini.log import log_line
from gemini.runtime.call_outcome import CallPath
from gemini.schedule.user_plan import replicas

if TYPE_CHECKING:
    from torch import nn

    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.run_journal import ModelJournal

_SHOWN = 4  # models at the end of a run


def show(
    model: nn.Module,
    plan: StepPlan,
    trained_by: str,
    config: GeminiConfig,
    single_ms: float | None = None,
    *,
    state_mb: float = 0.0,
) -> None:
    """Print the summary; a closed standard error is ignored. `state_mb`: the present optimizer state."""
    from gemini.snapshot.rng_snapshot import GeneratorStates

    generators = GeneratorStates()  # rich consumes random numbers for its links
    try:
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, text in rows(model, plan, trained_by, config, single_ms, state_mb=state_mb):
            table.add_row(f"[dim]{name}[/dim]", text)
        console = Console(file=sys.stderr, highlight=False)
        with console.capture() as rendered:
            console.print(Panel(table, title="Gemini", expand=False))
        log_line(rendered.get().removesuffix("\n"))
    except (OSError, ValueError):  # standard error is closed
        pass
    finally:
        generators.restore()


def rows(
    model: nn.Module,
    plan: StepPlan,
    trained_by: str,
    config: GeminiConfig,
    single_ms: float | None = None,
    *,
    state_mb: float = 0.0,
) -> list[tuple[str, str]]:
    """Return the rows of the summary: (name, text)."""
    count = sum(one.numel() for one in model.parameters())
    analysis = plan.analysis
    shares = [sum(one.parameters for one in analysis.stages if one.worker == at) for at in range(plan.schedule.ndevs)]
    total = sum(shares) or 1
    copies = 1 if all(shares) else replicas(plan.schedule)
    shares = shares[: len(shares) // copies] * copies
    if single_ms is None:
        single_ms, what = analysis.single_ms, "one worker"
    else:
        what = "this process"
    gain = single_ms / plan.step_ms if plan.step_ms else 1.0
    edited = plan.edited_stages()
    program = (
        []
        if plan.program is None
        else [
            ("program", plan.program.folder.name + (f", edited: {', '.join(edited[1])}" if edited else ", as compiled"))
        ]
    )
    parameters = " / ".join(f"{share / total:.0%}" for share in shares)
    return [
        ("model", f"{type(model).__name__}, {_amount(count)} parameters, trained by {trained_by}"),
        ("stages", (f"{copies} replicas of " if copies > 1 else "") + f"{plan.nstages} on {plan.nworkers} workers, "
                   f"balance {analysis.balance:.2f}, parameters {parameters}"),
        *_shard_rows(plan),
        ("schedule", f"{plan.name}, {plan.micro_batches_text}, {analysis.bubble:.0%} idle"
                     + (", plan from cache" if plan.is_cached else "")),
        ("expected", f"{_ms(plan.step_ms)} per step, {gain:.2f} × {what} ({_ms(single_ms)})"),
        *memory_rows(plan, trained_by, state_mb),
        *program,
        ("run folder", _near(config.run_folder)),
    ]  # fmt: skip


def _shard_rows(plan: StepPlan) -> list[tuple[str, str]]:
    """Return a row on the shards of every stage."""
    if plan.shards is None:
        return [("shards", f"none: {plan.unsharded_reason}")] if plan.unsharded_reason else []
    found = Counter(one.name for one in plan.shards.collectives() if one.phase != "step")
    moves = ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"
    where = "in some stages" if plan.has_groups else "per stage"
    text = f"{plan.shards.size} {where}, {plan.shards.sharded_share:.0%} of parameter bytes divided"
    return [("shards", text), ("collectives", f"{moves} per micro-batch")]


def closing_lines(models: Sequence[ModelJournal], config: GeminiConfig) -> list[str]:
    """Return the lines for the end of a run: what became of the calls of each model with workers."""
    lines = [_closing_line(model) for model in models[:_SHOWN]]
    if len(models) > _SHOWN:
        lines.append(f"{len(models) - _SHOWN} more models")
    folder = _near(config.run_folder)
    command = "gemini explain" if folder == ".gemini" else f"gemini explain --run-folder {folder}"
    return [*lines[:-1], f"{lines[-1]}; {command} shows more"] if lines else []


def _closing_line(model: ModelJournal) -> str:
    calls = sum(model.steps.values())
    if not calls:
        return f"{model.model}: no call used the workers: the first one runs in this process"
    overlapped = model.steps.get(CallPath.OVERLAPPED, 0)
    text = f"{model.model}: {overlapped or 'none'} of {calls} calls overlapped"
    if not overlapped:
        usual = max(model.steps, key=lambda path: model.steps[path])
        way = "in this process" if usual == CallPath.LOCAL else f"by {CallPath(usual).label}"
        text += f" ({model.steps[usual]} {way}): {model.main_reason}"
    if model.step_ms:
        text += f", {_ms(model.step_ms)} per step" + (" of changing sizes" if model.sizes_differ else "")
    if model.gain:
        text += f" ({_ms(model.local_ms)} in this process: {model.gain:.2f} ×)"
    elif model.local_ms and not model.step_ms:
        text += f", {_ms(model.local_ms)} locally"
    return text


def _amount(count: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)


def _ms(time: float) -> str:
    return f"{time / 1e3:.2f} s" if time >= 1e3 else f"{time:.3g} ms"


def _near(folder: str) -> str:
    try:
        return min(folder, os.path.relpath(folder), key=len)
    except (OSError, ValueError):
        return folder
