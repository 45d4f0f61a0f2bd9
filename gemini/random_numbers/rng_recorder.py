"""RNG recorder: the random ops that code runs, and the growth of their shapes with the batch.

The code runs twice, on batches of different sizes. The random ops of both runs are matched one by one; the dimension
that grows counts samples:

    3 samples   bernoulli_ (3, 16, 8)   rand (1,)   bernoulli_ (8, 3, 64)
    2 samples   bernoulli_ (2, 16, 8)   rand (1,)   bernoulli_ (8, 2, 64)
                dim 0                   none        dim 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.random_numbers.random_ops import UnsliceableRandomOp, is_fill, is_random_op, memory_order, shape_of
from gemini.random_numbers.rng_patches import watch_random_functions
from gemini.tensor_parallel.layouts import Shard, local_size


@dataclass(frozen=True)
class RandomOp:
    """One op that used the generator."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None  # dimensions in memory order; None: with gaps
    is_patched: bool = False  # inside a patched function
    function: Any = field(default=None, compare=False)
    args: tuple[Any, ...] = field(default=(), compare=False)  # with empty tensors in place of its tensors
    kwargs: tuple[tuple[str, Any], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class RandomOpPattern:
    """Shape of a random op for any batch: `factor` entries per sample in dimension `dim`, or independent of samples."""

    name: str
    shape: tuple[int, ...]  # with 0 in the batch dimension
    order: tuple[int, ...]
    dim: int | None
    factor: int = 0

    is_patched: bool = False
    shard: Shard | None = None  # the slice of it that a shard uses; None: all

    def of(self, samples: int, shard: tuple[int, int] = (0, 1)) -> tuple[int, ...]:
        """Return the shape for a number of samples; `shard`: the number of a shard, and how many there are."""
        whole = self.shape
        if self.dim is not None:
            whole = (*self.shape[: self.dim], samples * self.factor, *self.shape[self.dim + 1 :])
        return whole if self.shard is None else local_size(self.shard, whole, shard[1], shard[0])


class RandomOpRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Records every random op that runs inside."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip the mode, torch would load its compiler."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RandomOp] = []
        self._in_patched = False

    @contextmanager
    def _patched_call(self) -> Iterator[None]:
        self._in_patched = True
        try:
            yield
        finally:
            self._in_patched = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the random ops that run inside."""
        with watch_random_functions(self._patched_call), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; compare the generator state if it may have used the generator."""
        if not is_random_op(func):
            return func(*args, **(kwargs or {}))
        if is_fill(func):
            given = tuple(one.new_empty(0) if isinstance(one, torch.Tensor) else one for one in args)
            named = tuple((kwargs or {}).items())
            shape, order = shape_of(func, args), memory_order(func, args)
            self.ops.append(RandomOp(str(func), shape, order, self._in_patched, func, given, named))
            return func(*args, **(kwargs or {}))
        before = torch.get_rng_state()
        found = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsliceableRandomOp(f"{func} draws random numbers that depend on contents of its arguments")
        return found


def match_patterns(
    first: Sequence[RandomOp], samples: int, second: Sequence[RandomOp], fewer: int
) -> list[RandomOpPattern]:
    """Return how random ops grow, from two runs on different numbers of samples; raises UnsliceableRandomOp."""
    if len(first) != len(second):
        raise UnsliceableRandomOp(f"{len(first)} random ops for {samples} samples, {len(second)} for {fewer}")
    return [_pattern(one, samples, other, fewer) for one, other in zip(first, second, strict=True)]


def _pattern(one: RandomOp, samples: int, other: RandomOp, fewer: int) -> RandomOpPattern:
    if one.name != other.name or len(one.shape) != len(other.shape):
        raise UnsliceableRandomOp(
            f"{one.name} {one.shape} for {samples} samples, {other.name} {other.shape} for {fewer}"
        )
    if one.order is None:
        raise UnsliceableRandomOp(f"{one.name} fills memory with gaps")
    grown = [dim for dim, (more, less) in enumerate(zip(one.shape, other.shape, strict=True)) if more != less]
    if not grown:
        return RandomOpPattern(one.name, one.shape, one.order, None, 0, one.is_patched)
    dim = grown[0]
    factor, rest = divmod(one.shape[dim], samples)
    if len(grown) > 1 or rest or other.shape[dim] != factor * fewer:
        raise UnsliceableRandomOp(f"{one.name} {one.shape} for {samples} samples, {other.shape} for {fewer}")
    return RandomOpPattern(
        one.name, (*one.shape[:dim], 0, *one.shape[dim + 1 :]), one.order, dim, factor, one.is_patched
    )
