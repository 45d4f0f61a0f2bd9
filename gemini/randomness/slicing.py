"""Slicing: a stage run by micro-batches draws what it would draw for the whole batch at once.

The first micro-batch that comes draws for all; the numbers are kept until the last has had its part. So masks equal
those of one device, and the generator ends where its would:

    whole batch      bernoulli_ (8, 16)  ──►  ▓░▓▓░▓░▓ │ ▓▓░▓▓▓░░ │ …
    micro-batches                             first       second
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.randomness.doors import at_doors
from gemini.randomness.fills import IN_PLACE, aten, draw_whole, draws, give, is_fill, shape_of
from gemini.randomness.recording import Pattern


class DrawsDiffer(Exception):
    """A stage does not draw as it did when it was recorded."""


class SlicedDraws:
    """The draws of one stage in one step."""

    def __init__(self, patterns: Sequence[Pattern], samples: int) -> None:
        self.patterns, self.samples = patterns, samples
        self._kept: list[torch.Tensor] = []

    @contextmanager
    def piece(self, start: int, length: int) -> Iterator[None]:
        """Inside runs the stage for samples from `start` on."""
        if not self.patterns:
            yield
            return
        mode = _Slicing(self, start, length)
        watched = at_doors(lambda: mode) if all(pattern.by_door for pattern in self.patterns) else mode
        with watched:
            yield
        if mode.at != len(self.patterns):
            raise DrawsDiffer(f"{mode.at} draws, {len(self.patterns)} were expected")

    def release(self) -> None:
        """No micro-batch will draw any more."""
        self._kept.clear()

    def take(self, at: int, where: tuple[int, int], function: Any, args: Any, kwargs: Any) -> Any:
        """What draw number `at` gives for some samples: the first of them, and how many."""
        start, length = where
        if at >= len(self.patterns):
            raise DrawsDiffer(f"more than the {len(self.patterns)} draws that were expected: {function}")
        pattern = self.patterns[at]
        if str(function) != pattern.name or shape_of(function, args) != pattern.of(length):
            raise DrawsDiffer(
                f"draw {at} is {function} {shape_of(function, args)}, expected {pattern.name} {pattern.of(length)}"
            )
        if at == len(self._kept):
            drawn = draw_whole(function, args, kwargs, pattern.of(self.samples), pattern.order)
            # Only zeros and ones: a byte is enough.
            self._kept.append(drawn.to(torch.bool) if function is aten.bernoulli_.float else drawn)
        elif at > len(self._kept):
            raise DrawsDiffer(f"draw {at} comes before draw {len(self._kept)}")
        part = self._kept[at]
        if pattern.dim is not None:
            part = part.narrow(pattern.dim, start * pattern.factor, length * pattern.factor)
        return give(function, args, part.to(args[0].dtype) if function in IN_PLACE else part)


class _Slicing(TorchDispatchMode):  # type: ignore[misc]
    """Hands out slices while a stage runs forward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would load its compiler."""
        return False

    def __init__(self, source: SlicedDraws, start: int, length: int) -> None:
        super().__init__()
        self.source, self.where = source, (start, length)
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; a draw gets its part."""
        kwargs = kwargs or {}
        if not draws(func) or not is_fill(func):
            return func(*args, **kwargs)
        at, self.at = self.at, self.at + 1
        return self.source.take(at, self.where, func, args, kwargs)
