"""Output relay: what modules print, warn and log in a worker is sent to the controller.

It then appears in the order in which the script caused it, goes where the script sends its own output (a notebook, a
file, a filter), passes the script's warning filters and logging levels, and a warning of two workers is shown once.
What C code writes to the descriptors goes directly to those of the script.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections import deque
from typing import Any

from gemini.runtime.protocol import Logged, Printed, Warned
from gemini.runtime.transport.link import Link

_FIELDS = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created", "msecs")
_STAGES = "<stages of "  # the file name of generated code


class OutputRelay:
    """Collects output and sends it; usable anywhere, in any thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: deque[Any] = deque()

    def install(self) -> None:
        """Redirect this process's output, warnings and logs."""
        sys.stdout, sys.stderr = _Stream(self, "stdout", sys.stdout), _Stream(self, "stderr", sys.stderr)
        warnings.simplefilter("always")  # the controller filters
        warnings.showwarning = self._warn  # type: ignore[assignment]
        logging.root.addHandler(_Handler(self))
        logging.root.setLevel(1)

    def send(self, message: Any) -> None:
        """Send a message now or, if this thread is in the middle of sending, with the next one."""
        self._waiting.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        while self._waiting:
            first = self._waiting[0]
            if not self.link.send(first, wait=False):
                return
            self._waiting.popleft()

    def _warn(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if not filename.startswith(_STAGES):  # no line of the script, which has warned in the first call
            self.send(Warned(category, str(message), filename, lineno))


class _Stream(io.TextIOBase):
    """A text stream whose lines go to the controller."""

    def __init__(self, relay: OutputRelay, name: str, below: Any) -> None:
        self._relay, self._name, self._below, self._line = relay, name, below, ""

    encoding = "utf-8"
    errors = "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._below.fileno())

    @property
    def buffer(self) -> Any:
        """The stream for bytes."""
        return self._below.buffer

    def write(self, text: str) -> int:
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._line = self._line, ""
        if text:
            self._relay.send(Printed(self._name, text))


class _Handler(logging.Handler):
    """Sends log records to the controller, whose loggers filter them."""

    def __init__(self, relay: OutputRelay) -> None:
        super().__init__()
        self._relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        found = {key: getattr(record, key) for key in _FIELDS}
        trace = self.format(record) if record.exc_info else ""
        self._relay.send(Logged({**found, "msg": record.getMessage(), "exc_text": trace or None}))
