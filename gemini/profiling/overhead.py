"""The overhead of measuring: what a reading has too much.

The clock itself takes time, on a GPU the events around a kernel. And a step starts one backward pass for all nodes
where each reading starts one of its own; that is read from a chain of trivial ops, as the time of a chain of one less
what each further link adds.
"""

from __future__ import annotations

import statistics

import torch

from gemini.profiling.device import Backward, Device, Times

_LINKS, _TRIES = 20, 15


def overhead_of(device: Device) -> Times:
    """The time (ms) that each reading has too much."""
    empty = _median([device.time(lambda: None, lambda _: lambda: None, 1.0) for _ in range(_TRIES)])
    short, long = (_chain(device, links) for links in (1, 1 + _LINKS))
    link, host_link = (
        max(0.0, (long.backward - short.backward) / _LINKS),
        max(0.0, (long.backward_host - short.backward_host) / _LINKS),
    )
    # On a GPU the kernels of backward are the same as ever; it is the host that starts more than it would.
    backward = empty.backward if device.kind == "cuda" else max(0.0, short.backward - link)
    return Times(empty.forward, backward, empty.forward_host, max(0.0, short.backward_host - host_link))


def _chain(device: Device, links: int) -> Times:
    start = torch.ones(1, device=device.torch_device, requires_grad=True)

    def forward() -> torch.Tensor:
        value = start
        for _ in range(links):
            value = value.view(1)
        return value

    def prepare(result: torch.Tensor) -> Backward:
        gradient = torch.ones_like(result)
        return lambda: torch.autograd.grad([result], [start], [gradient], allow_unused=True)

    return _median([device.time(forward, prepare, 1.0) for _ in range(_TRIES)])


def _median(found: list[Times]) -> Times:
    return Times(
        statistics.median(times.forward for times in found),
        statistics.median(times.backward for times in found),
        statistics.median(times.forward_host for times in found),
        statistics.median(times.backward_host for times in found),
    )
