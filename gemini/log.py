"""Log lines of Gemini on standard error, independent of `print`, and not inside progress bars.

Scripts replace `builtins.print`, for example to stamp the time or to print on one rank only; messages of Gemini must
not pass through such a replacement. Bars of tqdm that share the terminal are cleared before a line and drawn again
after it; live displays of rich replace `sys.stderr` themselves.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` is not loaded in every program
if TYPE_CHECKING:
    from typing import Any


def log_line(text: str) -> None:
    """Write one line to standard error, if the process has one."""
    if sys.stderr is None:
        return
    bars = _find_bars()
    if bars is None:
        _write(text)
    else:
        with bars.external_write_mode(file=sys.stderr):
            _write(text)


def _write(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _find_bars() -> Any:
    """Return the class of the active bars of tqdm that must be cleared for a line; None where there are none."""
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    try:
        active = [one.fp for one in bars._instances if hasattr(one, "start_t")]
    except (AttributeError, TypeError, RuntimeError):  # another package of that name, or another thread adds a bar
        return None
    # Bars that the script writes to a file or pipe on standard output stay as they are under `python`.
    is_own_output = any(file == sys.stdout for file in active) and not sys.stdout.isatty()
    return bars if active and not is_own_output else None
