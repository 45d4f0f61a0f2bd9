"""The summary: what was found and what is going to run, on standard error, before the first step by a plan."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gemini.config.gemini_config import GeminiConfig

if TYPE_CHECKING:
    from torch import nn

    from gemini.planner.step_plan import StepPlan


def show(
    model: nn.Module, plan: StepPlan, trained_by: str, config: GeminiConfig, single_ms: float | None = None
) -> None:
    """Print it. Where it cannot be printed, the program goes on all the same."""
    from gemini.snapshot.model_state import Generators

    generators = Generators()  # rich draws numbers for its links
    try:
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, text in rows(model, plan, trained_by, config, single_ms):
            table.add_row(f"[dim]{name}[/dim]", text)
        Console(file=sys.stderr, highlight=False).print(Panel(table, title="Gemini", expand=False))
    except (OSError, ValueError):  # standard error is closed
        pass
    finally:
        generators.restore()


def rows(
    model: nn.Module, plan: StepPlan, trained_by: str, config: GeminiConfig, single_ms: float | None = None
) -> list[tuple[str, str]]:
    """The lines of it, by name."""
    count = sum(one.numel() for one in model.parameters())
    analysis = plan.analysis
    shares = [sum(one.parameters for one in analysis.stages if one.worker == at) for at in range(plan.schedule.ndevs)]
    total = sum(shares) or 1
    if single_ms is None:
        single_ms, what = analysis.single_ms, "one worker alone"
    else:
        what = "this process"
    gain = single_ms / plan.step_ms if plan.step_ms else 1.0
    parameters = " / ".join(f"{share / total:.0%}" for share in shares)
    return [
        ("model", f"{type(model).__name__}, {_amount(count)} parameters, trained by {trained_by}"),
        ("stages", f"{plan.nstages} on {plan.schedule.ndevs} workers, balance {analysis.balance:.2f}, "
                   f"parameters {parameters}"),
        ("schedule", f"{plan.name}, {plan.pieces}, {analysis.bubble:.0%} idle"
                     + (", plan from cache" if plan.is_kept else "")),
        ("expected", f"{_ms(plan.step_ms)} a step, {gain:.2f} × {what} ({_ms(single_ms)})"),
        ("run folder", _near(config.run_folder)),
    ]  # fmt: skip


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
