"""Live line: the present step on the last row of the terminal, while a run trains (`--live`).

The terminal scrolls its other rows only, so the output of the script is not touched: neither its streams nor what it
writes. Each update is one write that saves and restores the cursor. Without a terminal there is no line.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

from gemini.runtime.run_journal import ModelJournal, journaled_models

_EVERY = 0.5  # seconds
_LEAST_ROWS = 4
_SAVE, _RESTORE = "\0337", "\0338"

_running: list[LiveLine] = []


def start_live_line() -> None:
    """Show the line until the process ends, if standard error is a terminal."""
    if _running and _running[0].owner == os.getpid():
        return
    try:
        descriptor = sys.stderr.fileno()
        if not os.isatty(descriptor):
            return
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a file
        return
    _running[:] = [LiveLine(os.dup(descriptor))]
    _running[0].start()


class LiveLine:
    """Reserves the last row of a terminal and renews it in a thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.owner = descriptor, os.getpid()
        self._rows = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gemini live line", daemon=True)

    def start(self) -> None:
        """Begin to show the line; it goes when the process ends."""
        atexit.register(self.end)
        self._thread.start()

    def end(self) -> None:
        """Remove the line and give the row back to the terminal."""
        if os.getpid() != self.owner or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=2 * _EVERY)
        if self._rows:
            self._write(f"{_SAVE}\033[r\033[{self._rows};1H\033[2K{_RESTORE}")

    def _run(self) -> None:
        while not self._ended.wait(_EVERY):
            text = " · ".join(filter(None, map(describe_step, journaled_models())))
            with suppress(OSError):
                if text:
                    self._show(text)

    def _show(self, text: str) -> None:
        size = os.get_terminal_size(self.descriptor)
        if size.lines < _LEAST_ROWS or os.getpgrp() != os.tcgetpgrp(self.descriptor):  # in the background
            return
        reserve = ""
        if size.lines != self._rows:  # at first, and after a change of size: scroll up once, so that no line is covered
            self._rows = size.lines
            reserve = f"\n{_SAVE}\033[1;{size.lines - 1}r{_RESTORE}\033[1A"
        line = f"gemini: {text}"[: size.columns - 1]
        self._write(f"{reserve}{_SAVE}\033[{size.lines};1H\033[2K\033[7m{line}\033[0m{_RESTORE}")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self.descriptor, text.encode())


def describe_step(journal: ModelJournal) -> str:
    """Return the present state of a model in one line; '' before its first call."""
    calls = sum(journal.steps.values())
    if not calls:
        return ""
    parts = [f"{journal.model} call {calls}"]
    if journal.step_ms:
        parts.append(f"{journal.step_ms:.3g} ms per step")
    if journal.idle_share is not None:
        parts.append(f"bubble {journal.idle_share:.0%}")
    if max(journal.peaks_mb, default=0.0) >= 1:
        parts.append(f"at most {max(journal.peaks_mb):.0f} MB per worker")
    if journal.gain:
        parts.append(f"{journal.gain:.2f} × one device")
    return ", ".join(parts)
