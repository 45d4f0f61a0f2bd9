"""Gradient layout: where the gradients of a step lie in all workers, by parameter.

Which worker computes which gradients does not change from step to step: the mapping is built once, when a worker has
reported where they lie. Gradients of parameters that several workers hold are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gemini.runtime.transport.borrowed_buffers import BufferGroup


class GradientLayout:
    """Where the gradients of one worker lie in steps of one kind, as it has reported."""

    def __init__(self, number: int, gradients: list[Any]) -> None:
        self.number = number
        self.latest = {home: latest for home, latest, _ in gradients}
        self.row = BufferGroup(header for _, _, header in gradients)


class GradientOrder:
    """The parameters of the gradients of all workers, worker by worker: those in their layouts, then loose ones."""

    def __init__(
        self,
        layouts: Sequence[GradientLayout],
        loose: Sequence[Sequence[tuple[int, int]]],
        parameters: Mapping[int, nn.Parameter],
    ) -> None:
        self.layouts = layouts
        places: dict[int, list[tuple[int, int]]] = {}  # by parameter: the latest stage that uses it, place
        owners: dict[int, nn.Parameter] = {}  # replicas of a parameter have numbers of their own
        at = 0
        for layout, more in zip(layouts, loose, strict=True):
            for home, latest in (*layout.latest.items(), *more):
                owner = parameters[home]
                owners[id(owner)] = owner
                places.setdefault(id(owner), []).append((latest, at))
                at += 1
        self.owners = [*owners.values()]
        self._first = [found[0][1] for found in places.values()]
        self._sums = [found for found in places.values() if len(found) > 1]

    @property
    def has_sums(self) -> bool:
        """Whether gradients of several workers are summed."""
        return bool(self._sums)

    def by_owner(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return one gradient per parameter."""
        if not self._sums:
            return tensors
        for found in self._sums:
            tensors[found[0][1]] = sum_parts([(latest, tensors[at]) for latest, at in found])
        return [tensors[at] for at in self._first]


def sum_parts(parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Sum the contributions of stages or workers, from the last to the first, into memory of the first."""
    parts.sort(key=lambda part: -part[0])
    total = parts[0][1]
    for _, part in parts[1:]:
        total = total.add_(part) if total.layout is part.layout is torch.strided else total + part
    return total
