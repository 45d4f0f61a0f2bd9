"""Log lines of Gemini on standard error, independent of `print`.

Scripts replace `builtins.print`, for example to stamp the time or to print on one rank only; messages of Gemini must
not pass through such a replacement.
"""

from __future__ import annotations

import sys


def log_line(text: str) -> None:
    """Write one line to standard error, if the process has one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
