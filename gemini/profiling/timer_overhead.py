"""Timer overhead: the time that measuring adds to each reading.

Reading the clock takes time, on a GPU recording the events around a kernel. And a step starts one backward pass for all
nodes, whereas each reading starts its own; that cost is measured on a chain of trivial ops: the time of one link minus
the time that each further link adds. Overhead is read between nodes, since a processor is slower amid other work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from gemini.autograd_engine import differentiate, edge_of
from gemini.profiling.detach import arm_backward_timer, detach_with_grad
from gemini.profiling.measured_device import CallTime, Device, NodeTimes, Stopwatch

EVERY = 24  # nodes between two readings
_LINKS = 20
_ONE = 1


class TimerOverhead:
    """Measures the overhead of empty calls and trivial backward passes."""

    def __init__(self, device: Device, watch: Stopwatch, timed: Callable[[Hashable, Any, int], Any]) -> None:
        self.device, self.watch, self.timed = device, watch, timed
        self.value = torch.ones(_ONE, device=device.torch_device)
        self.count = 0

    def forward(self) -> None:
        """Read the time of an empty call."""
        self.count += 1
        self.watch.time(("empty", self.count), lambda: None, 0)

    def backward(self) -> None:
        """Read the times of a trivial backward pass and of a longer one."""
        self.count += 1
        for links, name in ((1, "short"), (1 + _LINKS, "long")):
            self.timed((name, self.count), self._chain(links), 0)

    def _chain(self, links: int) -> Callable[[], object]:
        with torch.enable_grad():
            start = value = detach_with_grad(self.value)
            for _ in range(links):
                value = value.view(_ONE)
        root, ends = edge_of(value), (edge_of(start),)
        wanted = arm_backward_timer([root], ends) if self.device.is_asynchronous else ends
        return lambda: differentiate((root,), (self.value,), wanted)

    def read(self, spans: Mapping[Hashable, CallTime]) -> NodeTimes:
        """Return the overhead (ms) in each reading."""
        found: dict[str, list[CallTime]] = {"empty": [], "short": [], "long": []}
        for key, span in spans.items():
            if isinstance(key, tuple) and key[0] in found:
                found[key[0]].append(span)
        empty, short, long = (_median(found[name]) for name in ("empty", "short", "long"))
        start = CallTime(
            *(max(0.0, few - max(0.0, many - few) / _LINKS) for few, many in zip(short, long, strict=True))
        )
        # On a GPU only the host has extra work: the kernels of backward are those of a step.
        backward = empty.ms if self.device.is_asynchronous else start.ms
        return NodeTimes(empty.ms, backward, empty.host_ms, start.host_ms)


def _median(spans: list[CallTime]) -> CallTime:
    if not spans:
        return CallTime(0.0)
    return CallTime(statistics.median(span.ms for span in spans), statistics.median(span.host_ms for span in spans))
