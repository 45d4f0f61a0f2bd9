"""Class measurement: times, memory and work of one node class, as stored in the cache.

Values are identified by position, so that a measurement fits every node of its class: input 0 is the first tensor the
node reads, output 0 the first it produces.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gemini.profiling.flop_count import KernelCounts, KernelWork
from gemini.profiling.node_memory import NodeMemory
from gemini.profiling.reading_statistics import Reading

MEASURED, ANALYTIC = "measured", "analytic"


@dataclass(frozen=True)
class Measurement:
    """Times, memory and work of a node class. Host times are the calling thread's launch times on an asynchronous
    device (CUDA), else zero."""

    forward: Reading
    backward: Reading
    forward_host: Reading
    backward_host: Reading
    memory: NodeMemory
    forward_work: KernelCounts
    backward_work: KernelCounts
    source: str = MEASURED
    reason: str = ""  # why it is not measured

    @property
    def device_ms(self) -> float:
        """Device time, forward and backward."""
        return self.forward.ms + self.backward.ms

    @property
    def host_ms(self) -> float:
        """Host time, forward and backward."""
        return self.forward_host.ms + self.backward_host.ms

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Measurement:
        """Build a measurement from plain data; raises ValueError where it is invalid."""
        try:
            found = Measurement(
                Reading(**data["forward"]),
                Reading(**data["backward"]),
                Reading(**data["forward_host"]),
                Reading(**data["backward_host"]),
                _parse_memory(data["memory"]),
                _parse_work(data["forward_work"]),
                _parse_work(data["backward_work"]),
                data["source"],
                data["reason"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a measurement: {error}") from error
        _check(found)
        return found


def _parse_memory(data: dict[str, Any]) -> NodeMemory:
    lists = {name: tuple(data[name]) for name in ("saved_inputs", "saved_outputs", "aliases")}
    return NodeMemory(**{**data, **lists})


def _parse_work(data: dict[str, Any]) -> KernelCounts:
    return KernelCounts(tuple(KernelWork(**kernel) for kernel in data["kernels"]))


def _check(found: Measurement) -> None:
    readings = (found.forward, found.backward, found.forward_host, found.backward_host)
    numbers = [value for reading in readings for value in (reading.ms, reading.noise)]
    numbers += [found.memory.forward_peak, found.memory.backward_peak, found.memory.saved_own]
    numbers += [value for work in (found.forward_work, found.backward_work) for value in (work.flops, work.nbytes)]
    wrong = [x for x in numbers if not isinstance(x, (int, float)) or not math.isfinite(x) or x < 0]
    if wrong or found.source not in (MEASURED, ANALYTIC):
        raise ValueError(f"not a measurement: {wrong[0] if wrong else found.source!r}")
    memory = found.memory
    if not all(isinstance(x, int) for x in (*memory.saved_inputs, *memory.saved_outputs, *memory.aliases)):
        raise ValueError("not a measurement: positions are not integers")
