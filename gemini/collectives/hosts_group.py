"""Hosts group: shards on several hosts, by a process group of torch.distributed (gloo) of their own.

The shards meet at a store of torch.distributed. Every collective is an exchange of tensors whose shapes may differ;
sums are made in the order of the ranks, as on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.collectives.shard_group import ExchangeGroup, GroupLostError, sum_in_order

_DIMS = 12


class HostsGroup(ExchangeGroup):
    """The group as one process sees it, which listens on an address of its host."""

    def __init__(self, store: Any, rank: int, size: int, host: str, seconds: float) -> None:
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=seconds)
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def exchange(self, x: torch.Tensor, name: str, parts: int = 1) -> Sequence[torch.Tensor]:
        """Return the tensors of all shards, by rank."""
        order = self.count(name, x, parts)
        facts = torch.zeros(_DIMS + 3, dtype=torch.int64)
        facts[:3] = torch.tensor([order, x.numel(), x.dim()])
        facts[3 : 3 + x.dim()] = torch.tensor(x.shape, dtype=torch.int64)
        known = [torch.empty_like(facts) for _ in range(self.size)]
        self._gather(known, facts)
        self.check_order([int(one[0]) for one in known])
        most = max(int(one[1]) for one in known)
        mine = x.detach().reshape(-1)
        if mine.numel() < most:  # slices of unequal size
            mine = torch.cat([mine, mine.new_zeros(most - mine.numel())])
        found = [mine.new_empty(most) for _ in range(self.size)]
        if most:
            self._gather(found, mine.contiguous())
        shapes = [tuple(one[3 : 3 + int(one[2])].tolist()) for one in known]
        return [flat[: int(one[1])].view(shape) for flat, one, shape in zip(found, known, shapes, strict=True)]

    def sum_flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of large flat tensors of equal size: every process sums a part, in the order of the ranks."""
        each = -(-x.numel() // self.size)
        sent = x.new_zeros(each * self.size)
        sent[: x.numel()] = x
        parts, whole = torch.empty_like(sent), torch.empty_like(sent)
        try:
            self._group.alltoall_base(_bytes(parts), _bytes(sent), [], []).wait()
            own = sum_in_order(list(parts.view(self.size, each)))
            self._group.allgather([list(_bytes(whole).view(self.size, -1))], [_bytes(own)]).wait()
        except RuntimeError as error:
            raise GroupLostError(
                f"a replica on another host is gone: {str(error).partition(chr(10))[0]:.200}"
            ) from error
        return whole[: x.numel()]

    def _gather(self, found: list[torch.Tensor], mine: torch.Tensor) -> None:
        try:
            self._group.allgather([found], [mine]).wait()
        except RuntimeError as error:
            raise GroupLostError(f"a shard on another host is gone: {str(error).partition(chr(10))[0]:.200}") from error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)
