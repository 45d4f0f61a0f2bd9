"""Planning progress: the phase of a plan on the terminal, once planning has taken a second.

    ⠋ planning Net: profile, about 2 s left ━━━━━━━━━━━━╺━━━━━━━━━━━ 0:00:03

Drawn by a thread on standard error, and removed at the end. Where standard error is no terminal, a line tells the phase
after 1, 5, 21 … seconds. What is left follows from the usual shares of the phases, and at first from the calls of
modules (`planning_time`); a plan from the cache is ready sooner.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.progress_line import ProgressLine

PHASES = ("inspect the batch", "capture", "profile", "search", "generate stages")
_SHARES = (0.02, 0.4, 0.15, 0.33, 0.1)  # of the time: means of MLPs, transformers and loops of LSTM cells
_DELAY = 1.0  # seconds
_EVERY = 0.1

_phase: list[str] = []  # of the present plan; empty where none is made or shown
_predicted_s = [0.0]  # of the present plan


def begin_phase(name: str) -> None:
    """Note that a phase of planning begins."""
    if _phase:
        _phase[0] = name


def predict_seconds(seconds: float) -> None:
    """Note the predicted time of the present plan."""
    _predicted_s[0] = seconds


@contextmanager
def planning_progress(model: str, quiet: bool) -> Iterator[None]:
    """Show the phases of the block after a second, on a terminal."""
    if quiet or _phase:
        yield
        return
    _phase[:], _predicted_s[:] = [PHASES[0]], [0.0]
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
    at = _phase_number()
    left = f"about {_estimate_left(seconds):.0f} s left"
    return f"gemini: planning {model}: {PHASES[at]} ({at + 1} of {len(PHASES)}), {seconds:.0f} s so far, {left}"


def _phase_number() -> int:
    return PHASES.index(_phase[0]) if _phase else len(PHASES) - 1


def _estimate_left(seconds: float) -> float:
    """Return the seconds that are left, one at least, as if the present phase were half over."""
    at = _phase_number()
    done = sum(_SHARES[:at]) + _SHARES[at] / 2
    return max(max(seconds / done, _predicted_s[0]) - seconds, 1.0)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


def _draw(model: str, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_DELAY):
        return
    with _bar() as bar:
        task = bar.add_task(f"planning {model}: {_phase[0]}", total=1.0)
        while not ended.wait(_EVERY):
            seconds, at = time.monotonic() - began, _phase_number()
            left = _estimate_left(seconds)
            text = f"planning {model}: {PHASES[at]}, about {left:.0f} s left"
            bar.update(task, completed=seconds / (seconds + left), description=text)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, refresh_per_second=5)
