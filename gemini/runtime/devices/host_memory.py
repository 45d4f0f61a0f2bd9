"""Host memory: what is available, what limits it, and whether the kernel has killed processes for lack of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

MB = 1_000_000
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def format_bytes(size: float) -> str:
    """Format a size with its unit."""
    for unit, letter in ((1e12, "T"), (1e9, "G")):
        if size >= unit:
            return f"{size / unit:.1f} {letter}B"
    return f"{size / 1e6:.1f} MB"


def available_memory() -> tuple[int, str] | None:
    """Return the bytes that a process can still allocate, and which limit that is; None if it is unknown."""
    found = [(size, "of the machine's memory") for size in _fields("/proc/meminfo", "MemAvailable:", 1024)]
    for folder in _folders():
        limits = [*_number(folder / "memory.max"), *_number(folder / "memory.limit_in_bytes")]
        used = [*_number(folder / "memory.current"), *_number(folder / "memory.usage_in_bytes")]
        if limits and used and limits[0] < _UNLIMITED:
            # The page cache is reclaimed before the limit is reached.
            files = next(_fields(str(folder / "memory.stat"), "inactive_file", 1), 0)
            found.append((limits[0] - used[0] + files, f"of the {format_bytes(limits[0])} of its control group"))
    return min(found, default=None, key=lambda one: one[0])


def count_oom_kills() -> list[int]:
    """Return how many processes the kernel has killed for lack of memory, one entry per counter."""
    found = [*_fields("/proc/vmstat", "oom_kill", 1)]
    for folder in _folders():
        for name in ("memory.events", "memory.oom_control"):
            found += _fields(str(folder / name), "oom_kill", 1)
    return found


def peak_child_memory() -> int:
    """Return the largest peak memory of any ended child process, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _folders() -> Iterator[Path]:
    """Yield the control groups that account for this process: its own where visible, else the container's root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds or "memory" in kinds.split(","):
            root = _GROUPS if not kinds else _GROUPS / "memory"
            own = root / path.lstrip("/")
            yield own if own.is_dir() else root


def _fields(path: str, name: str, unit: int) -> Iterator[int]:
    try:
        text = Path(path).read_text()
    except OSError:
        return
    for line in text.splitlines():
        words = line.split()
        if words[:1] == [name] and words[1].isdigit():
            yield int(words[1]) * unit


def _number(path: Path) -> Iterator[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return
    if text.isdigit():
        yield int(text)
