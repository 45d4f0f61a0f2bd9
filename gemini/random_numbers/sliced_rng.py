"""Sliced random numbers: a stage in micro-batches generates the random numbers of the whole batch at once.

The first micro-batch generates them; they are stored until the last one has used its slice. So masks equal those of one
device, and the generator ends in the same state:

    whole batch      bernoulli_ (8, 16)  ──►  ▓░▓▓░▓░▓ │ ▓▓░▓▓▓░░ │ …
    micro-batches                             first       second

A shard of a divided stage generates those of the whole stage as well, and uses its slice.

A checkpoint reruns a part of the stage in backward, with the generator in the state in which that part began. So while
a micro-batch runs, the generator is in a state that encodes the position, a *mark*: a random op that runs in
that state again returns the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.random_numbers.random_ops import IN_PLACE, aten, draw_whole, is_fill, is_random_op, return_part, shape_of
from gemini.random_numbers.rng_patches import watch_random_functions
from gemini.random_numbers.rng_recorder import RandomOpPattern
from gemini.tensor_parallel.layouts import take_shard

_marks = itertools.count(0x6765_6D69_0000_0000)  # seeds that no script uses
_generator = torch.default_generator


class RandomOpsDiffer(Exception):
    """A stage does not run the recorded random ops."""


class SlicedRandomOps:
    """The random numbers of one stage in one step."""

    def __init__(self, patterns: Sequence[RandomOpPattern], samples: int, shard: tuple[int, int] = (0, 1)) -> None:
        """`shard`: the number of the shard that runs the stage, and how many there are."""
        self.patterns, self.samples, self.shard = patterns, samples, shard
        # exchanged values may have another memory order than on one device, in which masks would be others
        self._is_whole = shard[1] == 1 and all(pattern.shard is None for pattern in patterns)
        self._whole: list[torch.Tensor] = []
        self._next: torch.Tensor | None = None  # the generator state for the next random op of the whole batch
        self._places: dict[int, tuple[tuple[int, int], int]] = {}  # mark → samples, number of the random op

    @contextmanager
    def micro_batch(self, start: int, length: int) -> Iterator[None]:
        """Run the stage inside for samples from `start` on; leave the generator after all random ops so far."""
        if not self.patterns or (length == self.samples and self._is_whole):  # no slicing
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
            raise RandomOpsDiffer(f"{last} random ops, {len(self.patterns)} were expected")

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Run the backward of the stage inside: checkpoints repeat their random numbers."""
        if not self.patterns:
            yield
            return
        before = _generator.get_state()
        if not self._places:  # not sliced: a checkpoint restores the state itself
            yield
            if not torch.equal(before, _generator.get_state()):
                raise RandomOpsDiffer("random ops in backward, and none in forward")
            return
        try:
            with self._watch(_SlicingMode(self)):
                yield
        finally:
            _generator.set_state(before)

    def _watch(self, mode: _SlicingMode) -> Any:
        return watch_random_functions(lambda: mode) if all(pattern.is_patched for pattern in self.patterns) else mode

    def mark(self, where: tuple[int, int], at: int) -> int:
        """Encode in the generator that random op number `at` for some samples is the next."""
        seed = next(_marks)
        self._places[seed] = where, at
        _generator.manual_seed(seed)
        return seed

    def draw(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the part of the next random op, as the generator encodes it."""
        place = self._places.get(_generator.initial_seed())
        if place is None:
            raise RandomOpsDiffer(f"{function} in backward, and no random op in forward")
        where, at = place
        found = self.take(at, where, function, args, kwargs)
        self.mark(where, at + 1)
        return found

    def take(self, at: int, where: tuple[int, int], function: Any, args: Any, kwargs: Any) -> Any:
        """Return the part of random op number `at` for some samples: (start, length)."""
        start, length = where
        if at >= len(self.patterns):
            raise RandomOpsDiffer(f"more than the {len(self.patterns)} expected random ops: {function}")
        pattern = self.patterns[at]
        expected = pattern.of(length, self.shard)
        if str(function) != pattern.name or shape_of(function, args) != expected:
            raise RandomOpsDiffer(
                f"random op {at} is {function} {shape_of(function, args)}, expected {pattern.name} {expected}"
            )
        if at == len(self._whole):
            assert self._next is not None
            _generator.set_state(self._next)
            whole = replace(pattern, shard=None).of(self.samples)
            drawn = draw_whole(function, args, kwargs, whole, pattern.order)
            # zeros and ones only: a byte is enough
            self._whole.append(drawn.to(torch.bool) if function is aten.bernoulli_.float else drawn)
            self._next = _generator.get_state()
        elif at > len(self._whole):
            raise RandomOpsDiffer(f"random op {at} runs before random op {len(self._whole)}")
        part = self._whole[at]
        if pattern.dim is not None:
            part = part.narrow(pattern.dim, start * pattern.factor, length * pattern.factor)
        if pattern.shard is not None:
            part = take_shard(part, pattern.shard, self.shard[1], self.shard[0])
        return return_part(function, args, part.to(args[0].dtype) if function in IN_PLACE else part)


class _SlicingMode(TorchDispatchMode):  # type: ignore[misc]
    """Returns slices while a stage runs, forward or recomputation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip the mode, torch would load its compiler."""
        return False

    def __init__(self, source: SlicedRandomOps) -> None:
        super().__init__()
        self.source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; a random op returns its slice."""
        kwargs = kwargs or {}
        if not is_random_op(func) or not is_fill(func):
            return func(*args, **kwargs)
        return self.source.draw(func, args, kwargs)
