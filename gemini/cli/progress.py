"""A progress bar for commands that take a while: on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """Shows what is being done, and how far it is where that is known."""

    def __enter__(self) -> Bar:
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
        """Begin something whose length is not known."""
        if self.progress is not None:
            self.progress.remove_task(self.task)
            self.task = self.progress.add_task(what, total=None)

    def tell(self, done: int, total: int, what: str) -> None:
        """Show how far it is."""
        if self.progress is not None:
            self.progress.update(self.task, completed=done, total=total, description=what)

    def __exit__(self, *_: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
