"""Progress lines: during a long wait, a line on standard error after 1 s, and again after 5, 21, 85 … s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from gemini.log import log_line

_FIRST_S = 1.0
_GROWTH = 4.0


class ProgressLine:
    """Logs `describe(seconds)` while the block runs, in a thread of its own; nothing for a short one."""

    def __init__(self, describe: Callable[[float], str], *, quiet: bool = False) -> None:
        self._describe, self._quiet = describe, quiet
        self._began, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> ProgressLine:
        if not self._quiet:
            threading.Thread(target=self._log, name="gemini-progress-line", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()

    def _log(self) -> None:
        due = _FIRST_S
        while not self._ended.wait(due - (time.monotonic() - self._began)):
            log_line(self._describe(time.monotonic() - self._began))
            due = due * _GROWTH + _FIRST_S
