"""Overlap: the time of a step in which the calling thread runs ahead of the device.

The thread starts the kernels of a node in `host` ms, one after the other; the device runs them in `device` ms, each
not before it was started and not before the one ahead of it has ended:

    host    │ a │ b │ c │ d │
    device    │ a     │ b │ c │      │ d │      a and b limited by the device, d by the host

Whoever is behind decides. What a node adds to the end of the step is its share of the step; the shares add up to it,
where neither the host's times nor the device's would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gemini.profiling.class_measurement import Measurement


class Load(NamedTuple):
    """What one direction of one node asks of both sides."""

    host_ms: float
    device_ms: float
    launches: int


def shares(loads: Sequence[Load]) -> list[float]:
    """For loads in the order of a step, what each adds to the time at which all work so far is done (ms)."""
    started = ended = 0.0
    found = []
    for load in loads:
        started += load.host_ms
        # The last kernel cannot start before the host has come to it.
        last = load.device_ms / max(1, load.launches)
        end = max(ended + load.device_ms, started + last if load.device_ms else 0.0)
        found.append(end - ended)
        ended = end
    if found and started > ended:
        found[-1] += started - ended
    return found


def step_times(classes: Sequence[str], measured: Sequence[Measurement]) -> list[tuple[float, float]]:
    """(forward, backward) ms of every node in a step; nodes of one class share their mean.

    Where the device does not run behind, these are the times measured.
    """
    if not any(one.host_ms for one in measured):
        return [(one.forward.ms, one.backward.ms) for one in measured]
    forward = [Load(one.forward_host.ms, one.forward.ms, one.forward_work.count) for one in measured]
    backward = [Load(one.backward_host.ms, one.backward.ms, one.backward_work.count) for one in measured]
    found = shares([*forward, *reversed(backward)])
    count = len(measured)
    pooled: dict[str, list[tuple[float, float]]] = {}
    for name, *both in zip(classes, found[:count], reversed(found[count:]), strict=True):
        pooled.setdefault(name, []).append((both[0], both[1]))
    means = {
        name: (sum(f for f, _ in some) / len(some), sum(b for _, b in some) / len(some))
        for name, some in pooled.items()
    }
    return [means[name] for name in classes]
