"""The relay: what units print, warn and log in a worker is printed, warned and logged by the controller.

So it appears in the order in which the program caused it, goes where the program has sent its own output (a notebook, a
file, a filter), is subject to the program's warning filters and logging levels, and a warning that two workers give is
shown once. What C code writes to the descriptors goes to the program's own.
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
_STAGES = "<stages of "  # the name of a text that was generated


class OutputRelay:
    """Collects news and sends them; safe to use anywhere, in any thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: deque[Any] = deque()

    def install(self) -> None:
        """Take over this process's output, warnings and logs."""
        sys.stdout, sys.stderr = _Stream(self, "stdout", sys.stdout), _Stream(self, "stderr", sys.stderr)
        warnings.simplefilter("always")  # the controller filters
        warnings.showwarning = self._warn  # type: ignore[assignment]
        logging.root.addHandler(_Handler(self))
        logging.root.setLevel(1)

    def tell(self, news: Any) -> None:
        """Send news now or, where this thread is in the middle of sending, with the next."""
        self._waiting.append(news)
        self.deliver()

    def deliver(self) -> None:
        """Send what waits."""
        while self._waiting:
            first = self._waiting[0]
            if not self.link.send(first, wait=False):
                return
            self._waiting.popleft()

    def _warn(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if not filename.startswith(_STAGES):  # that is no line of the program's, whose own has warned in the first call
            self.tell(Warned(category, str(message), filename, lineno))


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
        """For those who write bytes."""
        return self._below.buffer

    def write(self, text: str) -> int:
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._line = self._line, ""
        if text:
            self._relay.tell(Printed(self._name, text))


class _Handler(logging.Handler):
    """Sends records to the controller, whose loggers decide."""

    def __init__(self, relay: OutputRelay) -> None:
        super().__init__()
        self._relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        found = {key: getattr(record, key) for key in _FIELDS}
        trace = self.format(record) if record.exc_info else ""
        self._relay.tell(Logged({**found, "msg": record.getMessage(), "exc_text": trace or None}))
