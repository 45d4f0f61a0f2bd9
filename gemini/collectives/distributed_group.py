"""Distributed group: shards on several hosts or GPUs, through a process group of torch.distributed (gloo or NCCL).

Every collective is an all-gather of tensors of one shape; sums are made locally in the order of the ranks, as on one
host. Large sums are reduced by slices first, so that every shard sends the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemini.collectives.shard_group import ExchangeGroup, sum_in_order
from gemini.tensor_parallel.layouts import ALL_REDUCE

_LARGE = 1 << 16  # bytes from which sums are made by slices


class DistributedGroup(ExchangeGroup):
    """The members of a process group; None: all processes."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self.process_group = process_group

    def exchange(self, x: torch.Tensor, name: str, parts: int = 1) -> Sequence[torch.Tensor]:
        """Return the tensors of all shards, by rank."""
        order = self.count(name, x, parts)
        facts = torch.tensor([order, x.numel(), *x.shape], device=x.device)
        known = [torch.empty_like(facts) for _ in range(self.size)]
        dist.all_gather(known, facts, group=self.process_group)
        self.check_order([int(one[0]) for one in known])
        shapes = [tuple(one[2:].tolist()) for one in known]
        most = max(int(one[1]) for one in known)
        mine = x.detach().reshape(-1)
        if mine.numel() < most:  # slices of unequal size
            mine = torch.cat([mine, mine.new_zeros(most - mine.numel())])
        found = [mine.new_empty(most) for _ in range(self.size)]
        dist.all_gather(found, mine.contiguous(), group=self.process_group)
        return [one[: x.new_empty(shape).numel()].view(shape) for one, shape in zip(found, shapes, strict=True)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all shards, in the order of their ranks: by slices, which are then gathered."""
        if self.size == 2 or x.numel() * x.element_size() < _LARGE:
            return super().all_reduce(x)
        self.count(ALL_REDUCE, x)
        flat = x.detach().reshape(-1)
        each = -(-flat.numel() // self.size)
        padded = torch.cat([flat, flat.new_zeros(each * self.size - flat.numel())])
        parts = [padded.new_empty(each) for _ in range(self.size)]
        dist.all_to_all(parts, list(padded.split(each)), group=self.process_group)
        sums = [padded.new_empty(each) for _ in range(self.size)]
        dist.all_gather(sums, sum_in_order(parts), group=self.process_group)
        return torch.cat(sums)[: flat.numel()].view(x.shape)
