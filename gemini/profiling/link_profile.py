"""Link profile: measured latency and bandwidth between worker processes.

Two processes, connected by torch.distributed over loopback like the workers of one machine, exchange tensors of several
sizes. Half a round trip is linear in the size: its intercept is the latency, its slope the inverse bandwidth.

    0 ──── size bytes ───►  1
    0 ◄─── size bytes ────  1      repeated; the median counts
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.errors import ArtifactError, ProfileError

if TYPE_CHECKING:
    from gemini.schedule.link_costs import Links

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes
_TRIES = 7
_TIMEOUT = timedelta(seconds=60)
FORMAT = 1


@dataclass(frozen=True)
class LinkProfile:
    """A link between two workers: `latency_ms`, `bandwidth` in bytes per millisecond, and the underlying readings.

    Times are in ms and sizes in bytes, the units of profiles and of `gemini.schedule.Links` made from them.
    """

    backend: str
    latency_ms: float
    bandwidth: float
    sizes: tuple[int, ...] = ()
    times_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("latency_ms", "bandwidth"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ProfileError(f"invalid link: {name} {value!r}\n    → measure the link again")

    def cost_ms(self, nbytes: float) -> float:
        """Return the time of a transfer."""
        return self.latency_ms + (nbytes / self.bandwidth if self.bandwidth else 0.0)

    def links(self) -> Links:
        """Return this link between all devices of a schedule."""
        from gemini.schedule.link_costs import Links

        return Links(self.latency_ms, self.bandwidth)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        try:
            Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1), encoding="utf-8")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: str | Path) -> LinkProfile:
        """Read a file written by `save`."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}") from error
        try:
            if data.pop("format") != FORMAT:
                raise KeyError("format")
            return LinkProfile(**{**data, "sizes": tuple(data["sizes"]), "times_ms": tuple(data["times_ms"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ProfileError(f"{path} is not a link profile: {error!r}\n    → measure the link again") from error


def fit_link(sizes: tuple[int, ...], times_ms: tuple[float, ...], backend: str = "given") -> LinkProfile:
    """Fit a link to readings: latency from the smallest message, bandwidth from the time per further byte."""
    if len(sizes) != len(times_ms) or not sizes:
        raise ProfileError(f"{len(sizes)} sizes and {len(times_ms)} times\n    → pass one time per size")
    latency = times_ms[0]
    added = sum(time_ms - latency for time_ms in times_ms)
    nbytes = sum(size - sizes[0] for size in sizes)
    return LinkProfile(backend, latency, nbytes / added if added > 0 else 0.0, sizes, times_ms)


def profile_link(backend: str = "gloo", sizes: tuple[int, ...] = SIZES) -> LinkProfile:
    """Measure the link between two worker processes on this machine."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "times.json")
        arguments = (str(Path(folder) / "store"), result, backend, sizes)
        try:
            processes.start_processes(_run_ping_pong, args=arguments, nprocs=2, join=True, start_method=_start_method())
            times = tuple(json.loads(Path(result).read_text(encoding="utf-8")))
        except Exception as error:
            raise ProfileError(
                f"the link between two processes ({backend}) cannot be measured: {error}\n"
                "    → check that torch.distributed can start processes on this machine"
            ) from error
    return fit_link(tuple(sizes), times, backend)


def _start_method() -> str:
    return "spawn" if sys.platform == "darwin" else "forkserver"


def _run_ping_pong(rank: int, store: str, result: str, backend: str, sizes: tuple[int, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=_TIMEOUT)
    try:
        times = [_ping_pong(dist, torch.zeros(size, dtype=torch.uint8), rank) for size in sizes]
        if rank == 0:
            Path(result).write_text(json.dumps(times), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _ping_pong(dist: Any, message: Any, rank: int) -> float:
    """Return the median of half a round trip (ms)."""
    found = []
    for _ in range(_TRIES + 1):
        begin = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        found.append((time.perf_counter() - begin) * 500)
    return statistics.median(found[1:])
