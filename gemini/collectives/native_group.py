"""Native group: the collectives of a process group of torch.distributed, on the device of the shards.

NCCL where each shard has its GPU, gloo on CPUs. A library chooses the order in which it adds, but every shard gets the
same bits. All shapes follow from the layouts, so nothing is exchanged but the values; the hashes of the collectives so
far are compared at every barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gemini.collectives.hosts_group import HostsGroup
from gemini.collectives.shard_group import MAXIMUM, GroupLostError, ShardGroup
from gemini.errors import WorkerError
from gemini.tensor_parallel.layouts import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Shard,
    join_shards,
    local_size,
    take_shard,
)


def join_process_group(store: Any, rank: int, size: int, host: str, seconds: float, device: torch.device) -> ShardGroup:  # noqa: PLR0917
    """Return the group of shards that meet at a store, by their device."""
    if device.type == "cpu":
        return HostsGroup(store, rank, size, host, seconds)
    if device.type != "cuda" or not dist.is_nccl_available():
        raise WorkerError(
            f"shards on {device.type} have no collectives here: this torch has no NCCL\n"
            "    → name CPUs in device_mapping, or install a torch with CUDA"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    torch.cuda.set_device(device)
    return NativeGroup(dist.ProcessGroupNCCL(store, rank, size, options), rank, size, device)


class NativeGroup(ShardGroup):
    """The group as one process sees it."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(rank, size)
        self._group, self._device = group, device

    def barrier(self) -> None:
        """Wait until all shards have come here."""
        own = torch.tensor([self._order], dtype=torch.int64, device=self._device)
        self.check_order(torch.cat(self._gather(own, [(1,)] * self.size)).tolist())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all shards."""
        return self._reduce(x, ALL_REDUCE, dist.ReduceOp.SUM)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest value of all shards, elementwise."""
        return self._reduce(x, MAXIMUM, dist.ReduceOp.MAX)

    def _reduce(self, x: torch.Tensor, name: str, op: Any) -> torch.Tensor:
        self.count(name, x)
        total = x.detach().clone(memory_format=torch.contiguous_format)
        options = distributed_c10d.AllreduceOptions()
        options.reduceOp = op
        if total.numel():
            self._wait(lambda: self._group.allreduce([total], options))
        return total

    def all_gather(self, x: torch.Tensor, layout: Shard, units: int = 0) -> torch.Tensor:
        """Return the whole of the slices of all shards."""
        self.count(ALL_GATHER, x, self.size)
        whole = self._whole_shape(x, layout, units)
        shapes = [local_size(layout, whole, self.size, rank) for rank in range(self.size)]
        return join_shards(self._gather(x.detach(), shapes), layout)

    def reduce_scatter(self, x: torch.Tensor, layout: Shard) -> torch.Tensor:
        """Return this shard's slice of the sum over all shards."""
        self.count(REDUCE_SCATTER, x)
        parts = [take_shard(x.detach(), layout, self.size, rank) for rank in range(self.size)]
        most = max(part.numel() for part in parts)
        given = x.new_zeros(self.size, most)
        for row, part in zip(given, parts, strict=True):
            row[: part.numel()].copy_(part.reshape(-1))
        own = x.new_empty(most)
        if most:
            self._wait(
                lambda: self._group._reduce_scatter_base(own, given.view(-1), distributed_c10d.ReduceScatterOptions())
            )
        mine = parts[self.rank]
        return own[: mine.numel()].view(mine.shape)

    def all_to_all(self, x: torch.Tensor, have: Shard, want: Shard, units: int = 0) -> torch.Tensor:
        """Return this shard's slice in another layout."""
        if have.dim == want.dim:
            return take_shard(self.all_gather(x, have, units), want, self.size, self.rank)
        self.count(ALL_TO_ALL, x, self.size)
        whole = self._whole_shape(x, have, units)
        sent = [take_shard(x.detach(), want, self.size, rank).reshape(-1) for rank in range(self.size)]
        sizes = [local_size(have, whole, self.size, rank) for rank in range(self.size)]
        shapes = [local_size(want, one, self.size, self.rank) for one in sizes]
        counts = [prod(shape) for shape in shapes]
        given, found = torch.cat(sent), x.new_empty(sum(counts))
        if x.numel():
            self._wait(lambda: self._group.alltoall_base(
                found, given, counts, [len(one) for one in sent], distributed_c10d.AllToAllOptions()
            ))  # fmt: skip
        parts = [part.view(shape) for part, shape in zip(found.split(counts), shapes, strict=True)]
        return join_shards(parts, have)

    def _whole_shape(self, x: torch.Tensor, layout: Shard, units: int) -> tuple[int, ...]:
        size = (units or x.shape[layout.dim] // layout.entries * self.size) * layout.entries
        return (*x.shape[: layout.dim], size, *x.shape[layout.dim + 1 :])

    def _gather(self, x: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return the tensors of all shards, of these shapes."""
        counts = [prod(shape) for shape in shapes]
        most = max(counts)
        flat = x.reshape(-1).view(torch.uint8) if x.dtype is torch.bool else x.reshape(-1)
        own = flat if flat.numel() == most else torch.cat([flat, flat.new_zeros(most - flat.numel())])
        found = own.new_empty(self.size, most)
        if most:
            self._wait(
                lambda: self._group._allgather_base(
                    found.view(-1), own.contiguous(), distributed_c10d.AllgatherOptions()
                )
            )
        return [row[:count].view(x.dtype).view(shape) for row, count, shape in zip(found, counts, shapes, strict=True)]

    @staticmethod
    def _wait(start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise GroupLostError(f"another shard is gone: {str(error).partition(chr(10))[0]:.200}") from error
