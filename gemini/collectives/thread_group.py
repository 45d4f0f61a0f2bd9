"""Thread group: shards as threads of one process, to compare a plan with one device and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gemini.collectives.shard_group import ExchangeGroup, GroupLostError, use_group

_Result = TypeVar("_Result")


class _Meeting:
    """The memory that the threads of a group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors: list[Any] = [None] * size
        self.orders = [0] * size


class ThreadGroup(ExchangeGroup):
    """The group as one thread sees it."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting

    def exchange(self, x: torch.Tensor, name: str, parts: int = 1) -> Sequence[torch.Tensor]:
        """Return the tensors of all shards, by rank."""
        meeting = self._meeting
        try:
            meeting.barrier.wait()
            meeting.tensors[self.rank] = x.detach().clone()
            meeting.orders[self.rank] = self.count(name, x, parts)
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupLostError("another shard of this group has raised") from None
        self.check_order(meeting.orders)
        return list(meeting.tensors)


def run_shards(size: int, run: Callable[[ThreadGroup], _Result]) -> list[_Result]:
    """Run a function once per shard, each in its thread and group; return the results by rank.

    The first exception of a shard is raised, after all threads have ended.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    grad = torch.is_grad_enabled()

    def work(rank: int) -> None:
        group = ThreadGroup(rank, size, meeting)
        try:
            with use_group(group), torch.set_grad_enabled(grad):
                results[rank] = run(group)
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    first = next((error for error in raised if not isinstance(error, GroupLostError)), raised[0] if raised else None)
    if first is not None:
        raise first
    return results
