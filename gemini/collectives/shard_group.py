"""Shard group: the shards that compute one stage together, and the collectives between them.

Every shard calls the same collectives in the same order. Sums are made in the order of the ranks, so that replicas
stay bitwise equal. Generated code has no group among its arguments: a shard runs it inside `use_group`.
"""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gemini.errors import GeminiError
from gemini.tensor_parallel.layouts import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Shard,
    join_shards,
    take_shard,
)

MAXIMUM = "all-reduce (maximum)"
BARRIER = "barrier"


class GroupLostError(GeminiError):
    """Another shard of the group is gone; the collective cannot complete."""


class CollectiveMismatchError(GeminiError):
    """The shards of a group are not at the same collective."""


class ShardGroup(ABC):
    """Some shards, of which this one has number `rank`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.counts: Counter[str] = Counter()  # collectives so far, by name
        self.wire: Counter[str] = Counter()  # bytes of whole values, by name
        self._order = 0  # hash of all collectives so far

    def count(self, name: str, x: torch.Tensor, parts: int = 1) -> int:
        """Count a collective; return the hash of all so far. `x` is one of `parts` parts of the value."""
        self.counts[name] += 1
        self.wire[name] += x.numel() * x.element_size() * parts
        self._order = zlib.crc32(f"{name} {x.dtype} {x.dim()}".encode(), self._order)
        return self._order

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all shards, in the order of their ranks."""

    @abstractmethod
    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest value of all shards, elementwise."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor, layout: Shard, units: int = 0) -> torch.Tensor:
        """Return the whole of all slices; `units` of the dimension, where shards have different numbers."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, layout: Shard) -> torch.Tensor:
        """Return this shard's slice of the sum over all shards."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, have: Shard, want: Shard, units: int = 0) -> torch.Tensor:
        """Return this shard's slice in another layout; `units` of the dimension that was divided."""

    def counted(self) -> Counter[str]:
        """Return the collectives so far by the names of plans, in which a maximum is an all-reduce."""
        found = Counter(self.counts)
        found[ALL_REDUCE] += found.pop(MAXIMUM, 0)
        return found

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all shards have come here; counts as no collective."""

    def check_order(self, orders: Sequence[int]) -> None:
        """Raise where shards are at different collectives; `orders` are the hashes of all shards, by rank."""
        other = next((rank for rank, order in enumerate(orders) if order != orders[self.rank]), None)
        if other is not None:
            raise CollectiveMismatchError(
                f"shards {self.rank} and {other} are at different collectives\n"
                "    → report the model and its plan; sharding_size=1 runs without collectives"
            )


class ExchangeGroup(ShardGroup):
    """A group in which every shard can read the tensors of the others: all collectives follow from that."""

    @abstractmethod
    def exchange(self, x: torch.Tensor, name: str, parts: int = 1) -> Sequence[torch.Tensor]:
        """Return the tensors of all shards, by rank; they are valid until the next exchange."""

    def barrier(self) -> None:
        """Wait until all shards have come here."""
        self.exchange(torch.zeros(1), BARRIER)
        del self.counts[BARRIER], self.wire[BARRIER]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all shards, in the order of their ranks."""
        return sum_in_order(self.exchange(x, ALL_REDUCE))

    def sum_flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of large flat tensors of equal size, in the order of the ranks."""
        return self.all_reduce(x)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest value of all shards, elementwise."""
        first, *rest = self.exchange(x, MAXIMUM)
        found = first.clone()
        for part in rest:
            torch.maximum(found, part, out=found)
        return found

    def all_gather(self, x: torch.Tensor, layout: Shard, units: int = 0) -> torch.Tensor:  # noqa: ARG002
        """Return the whole of the slices of all shards."""
        return join_shards(self.exchange(x, ALL_GATHER, self.size), layout)

    def reduce_scatter(self, x: torch.Tensor, layout: Shard) -> torch.Tensor:
        """Return this shard's slice of the sum over all shards."""
        parts = self.exchange(x, REDUCE_SCATTER)
        return sum_in_order([take_shard(part, layout, self.size, self.rank) for part in parts])

    def all_to_all(self, x: torch.Tensor, have: Shard, want: Shard, units: int = 0) -> torch.Tensor:  # noqa: ARG002
        """Return this shard's slice in another layout."""
        parts = self.exchange(x, ALL_TO_ALL, self.size)
        if have.dim == want.dim:
            return take_shard(join_shards(parts, have), want, self.size, self.rank)
        return join_shards([take_shard(part, want, self.size, self.rank) for part in parts], have)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the tensors of all shards, from the first to the last."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


# ── the group of the code that runs ────────────────────────────────────────────────────────────────────────────────
_active = threading.local()


@contextmanager
def use_group(group: ShardGroup | None) -> Iterator[None]:
    """Run the code of a shard inside, forward or backward; None: the stage has a single shard."""
    before = getattr(_active, "group", None)
    _active.group = group
    try:
        yield
    finally:
        _active.group = before


def active_group() -> ShardGroup:
    """Return the group of the shard that runs."""
    group: ShardGroup | None = getattr(_active, "group", None)
    if group is None:
        raise GeminiError("code of a shard runs outside of its group\n    → run it inside `use_group(group)`")
    return group
