"""The peak of a worker's memory: the most that it had since somebody began to ask, without what it had before models.

Counted is memory of the process's own and memory that it shares, not files of code. That of a GPU is not told: several
processes have segments of it, and none of them knows whose they are.
"""

from __future__ import annotations

import math
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FIRST_MB = 6.0  # what a first step brings along, whatever its model: code that is loaded late, and its heap


class PeakMemory:
    """Of this process."""

    def __init__(self) -> None:
        self._own_mb: float | None = None

    def settle(self) -> None:
        """A model is about to come; what is there until then is the worker's own."""
        if self._own_mb is None:
            found = _status()
            self._own_mb = found.get("VmRSS", math.nan) - found.get("RssFile", 0.0) + _FIRST_MB

    def begin(self) -> None:
        """What was before does not count."""
        try:
            _CLEAR.write_text("5")
        except OSError:  # then the peak of all its life is told
            return

    def mb(self) -> float:
        """The most since then; not a number where it cannot be known."""
        found = _status()
        return max(0.0, found.get("VmHWM", math.nan) - found.get("RssFile", 0.0) - (self._own_mb or 0.0))


def _status() -> dict[str, float]:
    """MB by name."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":") for line in lines if line.endswith(" kB")]
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}
