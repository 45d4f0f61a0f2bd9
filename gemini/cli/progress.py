"""Progress bar of long commands, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBar:
    """Shows the current activity, and its progress if known."""

    def __enter__(self) -> ProgressBar:
        self.progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self.progress.start()
            self.task = self.progress.add_task("")
        return self

    def step(self, what: str) -> None:
        """Begin an activity of unknown length."""
        if self.progress is not None:
            self.progress.remove_task(self.task)
            self.task = self.progress.add_task(what, total=None)

    def update(self, done: int, total: int, what: str) -> None:
        """Update the progress."""
        if self.progress is not None:
            self.progress.update(self.task, completed=done, total=total, description=what)

    def __exit__(self, *_: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
