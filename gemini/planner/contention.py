"""Contention: slow-down of a worker while all workers compute, relative to this process alone.

Processes on one machine share the memory bandwidth, two hardware threads share a core, and cores differ, in particular
on virtual machines. Two small probes measure the effect: a copy that exceeds the caches and a computation that fits
into them, in this process alone and in all workers at the same time (`runtime.pool.speed_probe`). Without running
workers, plain Python processes replace them.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemini.planner.plan_request import SpeedProbe
from gemini.profiling.host_speed import HostSpeed
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.profile_result import Profile

_MAX_FACTOR = 3.0  # more than that is the load of other users of the machine
_TIMEOUT_S = 20.0
_COPIED_MB = 32

# Rates refer to processor time: waiting for a core is not contention.
_PROBE = f"""
import ctypes, hashlib, sys, time
size = {_COPIED_MB} << 20
source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
little = bytes(1 << 16)
def rate(call, seconds):
    call()
    count, end, begin = 0, time.perf_counter() + seconds, time.process_time()
    while time.perf_counter() < end:
        call()
        count += 1
    return count / max(time.process_time() - begin, 1e-9)
copy = lambda: ctypes.memmove(target, source, size)
compute = lambda: hashlib.sha256(little).digest()
copy()
print(flush=True)
sys.stdin.readline()
print(rate(copy, 0.12), rate(compute, 0.05), flush=True)
"""


@dataclass(frozen=True)
class Contention:
    """Slow-down factors of memory-bound and of compute-bound work, and the copy rate of one core alone."""

    memory: float = 1.0
    compute: float = 1.0
    mb_per_ms: float = 10.0  # read and written

    def slow_down(self, profile: Profile) -> Profile:
        """Return the profile with the times of nodes while all workers compute."""
        return replace(profile, nodes=tuple(self._slow_node(node) for node in profile.nodes))

    def _slow_node(self, node: NodeCost) -> NodeCost:
        backward_mb = node.moved_mb - node.forward_moved_mb
        return replace(
            node,
            forward_ms=node.forward_ms * self.factor(node.forward_ms, node.forward_moved_mb),
            backward_ms=node.backward_ms * self.factor(node.backward_ms, backward_mb),
        )

    def factor(self, ms: float, moved_mb: float) -> float:
        """Return the slow-down of work of `ms` that moves `moved_mb`: memory-bound as far as that explains its time."""
        share = min(1.0, moved_mb / (self.mb_per_ms * ms)) if ms > 0 else 0.0
        return share * self.memory + (1 - share) * self.compute


def measure_contention(workers: int, threads: int = 1, measure_speeds: SpeedProbe | None = None) -> Contention:
    """Return the contention among `workers` processes on the cores of this process.

    `measure_speeds` measures the running workers; without it short-lived processes replace them. If probes
    cannot run, no contention is assumed.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    speeds = None if measure_speeds is None else measure_speeds()
    if speeds is not None:
        return contention_from_speeds(*speeds, turns=max(1.0, workers * threads / len(cores)))
    return _measure_with_probes(workers, threads, cores)


def contention_from_speeds(alone: HostSpeed, workers: Sequence[HostSpeed], turns: float = 1.0) -> Contention:
    """Return the contention of the median worker, from measured speeds.

    `turns` is the number of threads per core, which processor time does not show. On a shared machine the slowest
    worker changes from second to second, hence the median.
    """
    middle = HostSpeed(*(statistics.median(values) for values in zip(*workers, strict=True)))
    memory, compute = (
        min(_MAX_FACTOR, max(1 / _MAX_FACTOR, one / max(other, 1e-9))) * turns
        for one, other in ((alone.moved_mb, middle.moved_mb), (alone.products, middle.products))
    )
    return Contention(memory, compute, alone.moved_mb)


@functools.lru_cache(maxsize=16)
def _measure_with_probes(workers: int, threads: int, cores: tuple[int, ...]) -> Contention:
    wanted = workers * threads
    turns = max(1.0, wanted / len(cores))  # with more threads than cores they take turns
    try:
        alone, together = _rates(min(threads, len(cores))), _rates(min(wanted, len(cores)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return Contention(turns, turns)
    slower = [min(_MAX_FACTOR, max(1.0, one / max(other, 1e-9))) for one, other in zip(alone, together, strict=True)]
    return Contention(slower[0] * turns, slower[1] * turns, alone[0] * 2 * _COPIED_MB / 1e3)


def _rates(count: int) -> tuple[float, float]:
    """Return the copy and compute rates of one of `count` concurrent processes."""
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    probes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROBE], **streams) for _ in range(count)]
    try:
        for probe in probes:
            assert probe.stdout is not None
            probe.stdout.readline()
        for probe in probes:
            assert probe.stdin is not None
            probe.stdin.write("\n")
            probe.stdin.flush()
        found = [[float(part) for part in probe.communicate(timeout=_TIMEOUT_S)[0].split()] for probe in probes]
    finally:
        for probe in probes:
            probe.kill()
            probe.wait()
    return _middle([one[0] for one in found]), _middle([one[1] for one in found])


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
