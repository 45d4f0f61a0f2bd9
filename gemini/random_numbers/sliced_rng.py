"""Slicing: a stage run by micro-batches draws what it would draw for the whole batch at once.

The first micro-batch that comes draws for all; the numbers are kept until the last has had its part. So masks equal
those of one device, and the generator ends where its would:

    whole batch      bernoulli_ (8, 16)  ──►  ▓░▓▓░▓░▓ │ ▓▓░▓▓▓░░ │ …
    micro-batches                             first       second

A checkpoint runs a part of the stage again in backward, with the generator in the state in which that part began. So
while a micro-batch runs, the generator is in a state that tells where it is, a *mark*: whoever finds it in that state
later, and draws, gets the same numbers again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.random_numbers.random_ops import IN_PLACE, aten, draw_whole, is_fill, is_random_op, return_part, shape_of
from gemini.random_numbers.rng_patches import watch_random_functions
from gemini.random_numbers.rng_recorder import RandomOpPattern

_marks = itertools.count(0x6765_6D69_0000_0000)  # seeds that nobody else takes
_generator = torch.default_generator


class RandomOpsDiffer(Exception):
    """A stage does not draw as it did when it was recorded."""


class SlicedRandomOps:
    """The draws of one stage in one step."""

    def __init__(self, patterns: Sequence[RandomOpPattern], samples: int) -> None:
        self.patterns, self.samples = patterns, samples
        self._whole: list[torch.Tensor] = []
        self._next: torch.Tensor | None = None  # the state of the generator for the next draw of the whole batch
        self._places: dict[int, tuple[tuple[int, int], int]] = {}  # by mark: samples, and number of the draw

    @contextmanager
    def micro_batch(self, start: int, length: int) -> Iterator[None]:
        """Inside runs the stage for samples from `start` on; the generator is left after all draws so far."""
        if not self.patterns or length == self.samples:  # all of the batch: it draws as it comes
            yield
            return
        if self._next is None:
            self._next = _generator.get_state()
        mode = _SlicingMode(self)
        self.mark((start, length), 0)
        try:
            with self._watch(mode):
                yield
        finally:
            last = self._places.get(_generator.initial_seed(), ((0, 0), -1))[1]
            _generator.set_state(self._next)
        if last != len(self.patterns):
            raise RandomOpsDiffer(f"{last} draws, {len(self.patterns)} were expected")

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Inside runs the backward of the stage: checkpoints draw again what they drew."""
        if not self.patterns:
            yield
            return
        before = _generator.get_state()
        if not self._places:  # it drew as it came, and a checkpoint does again by itself
            yield
            if not torch.equal(before, _generator.get_state()):
                raise RandomOpsDiffer("random numbers in backward, where nothing was drawn in forward")
            return
        try:
            with self._watch(_SlicingMode(self)):
                yield
        finally:
            _generator.set_state(before)

    def _watch(self, mode: _SlicingMode) -> Any:
        return watch_random_functions(lambda: mode) if all(pattern.is_patched for pattern in self.patterns) else mode

    def mark(self, where: tuple[int, int], at: int) -> int:
        """Have the generator say that draw number `at` for some samples is the next."""
        seed = next(_marks)
        self._places[seed] = where, at
        _generator.manual_seed(seed)
        return seed

    def draw(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The part of the draw that is the next, as the generator says."""
        place = self._places.get(_generator.initial_seed())
        if place is None:
            raise RandomOpsDiffer(f"{function} where nothing was drawn in forward")
        where, at = place
        found = self.take(at, where, function, args, kwargs)
        self.mark(where, at + 1)
        return found

    def take(self, at: int, where: tuple[int, int], function: Any, args: Any, kwargs: Any) -> Any:
        """What draw number `at` gives for some samples: the first of them, and how many."""
        start, length = where
        if at >= len(self.patterns):
            raise RandomOpsDiffer(f"more than the {len(self.patterns)} draws that were expected: {function}")
        pattern = self.patterns[at]
        if str(function) != pattern.name or shape_of(function, args) != pattern.of(length):
            raise RandomOpsDiffer(
                f"draw {at} is {function} {shape_of(function, args)}, expected {pattern.name} {pattern.of(length)}"
            )
        if at == len(self._whole):
            assert self._next is not None
            _generator.set_state(self._next)
            drawn = draw_whole(function, args, kwargs, pattern.of(self.samples), pattern.order)
            # Only zeros and ones: a byte is enough.
            self._whole.append(drawn.to(torch.bool) if function is aten.bernoulli_.float else drawn)
            self._next = _generator.get_state()
        elif at > len(self._whole):
            raise RandomOpsDiffer(f"draw {at} comes before draw {len(self._whole)}")
        part = self._whole[at]
        if pattern.dim is not None:
            part = part.narrow(pattern.dim, start * pattern.factor, length * pattern.factor)
        return return_part(function, args, part.to(args[0].dtype) if function in IN_PLACE else part)


class _SlicingMode(TorchDispatchMode):  # type: ignore[misc]
    """Hands out slices while a stage runs, forward or again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would load its compiler."""
        return False

    def __init__(self, source: SlicedRandomOps) -> None:
        super().__init__()
        self.source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; a draw gets its part."""
        kwargs = kwargs or {}
        if not is_random_op(func) or not is_fill(func):
            return func(*args, **kwargs)
        return self.source.draw(func, args, kwargs)
