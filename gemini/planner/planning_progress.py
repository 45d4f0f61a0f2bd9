"""Planning progress: the phase of a plan on the terminal, once planning has taken a second.

    ⠋ planning Net: profile ━━━━━━━━━━━━╺━━━━━━━━━━━ 0:00:03

Drawn by a thread on standard error, and removed at the end. Where standard error is no terminal, a line tells the phase
after 1, 5, 21 … seconds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.progress_line import ProgressLine

PHASES = ("inspect the batch", "capture", "profile", "search", "generate stages")
_DELAY = 1.0  # seconds
_EVERY = 0.1

_phase: list[str] = []  # of the present plan; empty where none is made or shown


def begin_phase(name: str) -> None:
    """Note that a phase of planning begins."""
    if _phase:
        _phase[0] = name


@contextmanager
def planning_progress(model: str, quiet: bool) -> Iterator[None]:
    """Show the phases of the block after a second, on a terminal."""
    if quiet or _phase:
        yield
        return
    _phase[:] = [PHASES[0]]
    if not _is_terminal():
        try:
            with ProgressLine(lambda seconds: _describe(model, seconds)):
                yield
        finally:
            _phase.clear()
        return
    ended = threading.Event()
    thread = threading.Thread(target=_draw, args=(model, ended), name="gemini planning progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _phase.clear()


def _describe(model: str, seconds: float) -> str:
    at = PHASES.index(_phase[0]) + 1 if _phase else len(PHASES)
    return f"gemini: planning {model}: {PHASES[at - 1]} ({at} of {len(PHASES)}), {seconds:.0f} s so far"


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


def _draw(model: str, ended: threading.Event) -> None:
    if ended.wait(_DELAY):
        return
    with _bar() as bar:
        task = bar.add_task(f"planning {model}: {_phase[0]}", total=len(PHASES))
        while not ended.wait(_EVERY):
            at = PHASES.index(_phase[0])
            bar.update(task, completed=at, description=f"planning {model}: {PHASES[at]}")


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, refresh_per_second=5)
