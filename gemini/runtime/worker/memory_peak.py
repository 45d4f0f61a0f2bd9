"""Peak memory: the most memory that a worker has had since the last reset, without its base memory before any model.

Private and shared memory count, mapped code files do not. GPU memory is not measured: several processes map segments
of it.
"""

from __future__ import annotations

import math
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FIRST_MB = 6.0  # what a first step adds for any model: code loaded late, and its heap


class PeakMemory:
    """The peak memory of this process."""

    def __init__(self) -> None:
        self._own_mb: float | None = None

    def settle(self) -> None:
        """Record the base memory of the worker, before the first model."""
        if self._own_mb is None:
            found = _status()
            self._own_mb = found.get("VmRSS", math.nan) - found.get("RssFile", 0.0) + _FIRST_MB

    def begin(self) -> None:
        """Reset the peak."""
        try:
            _CLEAR.write_text("5")
        except OSError:  # then the peak since the start is reported
            return

    def mb(self) -> float:
        """Return the peak in MB; NaN if it cannot be measured."""
        found = _status()
        return max(0.0, found.get("VmHWM", math.nan) - found.get("RssFile", 0.0) - (self._own_mb or 0.0))


def _status() -> dict[str, float]:
    """Return the fields of /proc/self/status in MB."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [line.split(":") for line in lines if line.endswith(" kB")]
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}
