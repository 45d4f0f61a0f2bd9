"""The overhead of measuring: what a reading has too much.

The clock itself takes time, on a GPU the events around a kernel. And a step starts one backward pass for all nodes
where each reading starts one of its own; that is read from a chain of trivial ops, as the time of a chain of one less
what each further link adds. These readings are taken between those of nodes, as a processor in the midst of other work
is slower than one that does nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from gemini.autograd_engine import differentiate, edge_of
from gemini.profiling.detach import cut, stamp
from gemini.profiling.measured_device import Device, Span, Stopwatch, Times

EVERY = 24  # nodes between two readings
_LINKS = 20
_ONE = 1


class Overhead:
    """Takes readings of nothing."""

    def __init__(self, device: Device, watch: Stopwatch, timed: Callable[[Hashable, Any, int], Any]) -> None:
        self.device, self.watch, self.timed = device, watch, timed
        self.value = torch.ones(_ONE, device=device.torch_device)
        self.count = 0

    def forward(self) -> None:
        """One reading of a call that does nothing."""
        self.count += 1
        self.watch.time(("empty", self.count), lambda: None, 0)

    def backward(self) -> None:
        """One reading of a backward pass that does nothing, and of a longer one."""
        self.count += 1
        for links, name in ((1, "short"), (1 + _LINKS, "long")):
            self.timed((name, self.count), self._chain(links), 0)

    def _chain(self, links: int) -> Callable[[], object]:
        with torch.enable_grad():
            start = value = cut(self.value)
            for _ in range(links):
                value = value.view(_ONE)
        root, ends = edge_of(value), (edge_of(start),)
        wanted = stamp([root], ends) if self.device.runs_behind else ends
        return lambda: differentiate((root,), (self.value,), wanted)

    def read(self, spans: Mapping[Hashable, Span]) -> Times:
        """The time (ms) that each reading has too much."""
        found: dict[str, list[Span]] = {"empty": [], "short": [], "long": []}
        for key, span in spans.items():
            if isinstance(key, tuple) and key[0] in found:
                found[key[0]].append(span)
        empty, short, long = (_median(found[name]) for name in ("empty", "short", "long"))
        start = Span(*(max(0.0, few - max(0.0, many - few) / _LINKS) for few, many in zip(short, long, strict=True)))
        # On a GPU the kernels of backward are the same as ever; it is the host that starts more than it would.
        backward = empty.ms if self.device.runs_behind else start.ms
        return Times(empty.ms, backward, empty.host_ms, start.host_ms)


def _median(spans: list[Span]) -> Span:
    if not spans:
        return Span(0.0)
    return Span(statistics.median(span.ms for span in spans), statistics.median(span.host_ms for span in spans))
