"""Group gradients: whole gradients of divided parameters, in one slab that all shards of a group write to.

Shard 0 takes the slab from its pool at the beginning of a step and tells the others where it lies; each writes its
slice of every gradient. After the step shard 0 hands the whole gradients over as if it had computed them: optimizers,
clipping and hooks of the script see whole gradients, and nothing has been copied. Shards that share no memory with the
controller gather their slices instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gemini.collectives.shard_group import ExchangeGroup, ShardGroup
from gemini.runtime.devices.base import Segment
from gemini.runtime.step_messages import PeerMessage
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import ALIGN, Slab
from gemini.runtime.transport.tensor_header import TensorPart
from gemini.runtime.worker.p2p import PeerLinks
from gemini.runtime.worker.stage_shards import ParameterShard
from gemini.runtime.worker.value_mailbox import ValueMailbox
from gemini.tensor_parallel.local_graph import parameter_slice

GATHER = "gather of gradients"


class GroupLayout(NamedTuple):
    """Where the gradients of divided parameters lie in the slab: equal in all shards."""

    size: int
    parts: dict[int, TensorPart]  # by identity of the leaf

    @staticmethod
    def build(slices: Iterable[ParameterShard]) -> GroupLayout:
        """Lay out the gradients of some parameters, in their order."""
        end, parts = 0, dict[int, TensorPart]()
        for one in slices:
            parts[id(one.leaf)] = part = TensorPart.like(one.whole.detach(), end)
            end += -(-part.nbytes // ALIGN) * ALIGN
        return GroupLayout(end, parts)


class GroupGradients:
    """The slab of one step."""

    def __init__(
        self, layout: GroupLayout, slices: dict[int, ParameterShard], members: tuple[int, ...], rank: int
    ) -> None:
        self.layout, self.slices = layout, slices
        self.leader, self.others, self.is_leader = members[0], members[1:], not rank
        self._memory: torch.Tensor | None = None
        self._slab: Slab | None = None

    def begin(self, step: int, peers: PeerLinks, control: Link, mailbox: ValueMailbox) -> None:
        """Take the slab and announce it; the other shards wait for that with their first gradient."""
        self._peers, self._control, self._mailbox = peers, control, mailbox
        if not self.is_leader:
            return
        pool = control.transport.buffers[0].pool
        self._slab = slab = pool.take_for_group(self.layout.size)
        self._memory = pool.view(slab, self.layout.size)
        for peer in self.others:
            is_new = peers.announce(peer, slab.segment)
            descriptors = (pool.descriptor_of(slab),) if is_new else ()
            where = [slab.segment, slab.offset, self.layout.size, pool.segments[slab.segment].size]
            peers.send(peer, PeerMessage(step, "buffers", 0, where, b"", []), descriptors)

    def whole(self, leaf: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return the header of a whole gradient, None in all shards but the first, and the slice of this shard."""
        if self._memory is None:
            self._memory = self._open()
        part = self.layout.parts[id(leaf)]
        if self._slab is None:
            return None, self.slices[id(leaf)].of(part.view(self._memory))
        header, whole = part.on(self._slab, self._memory)
        return header, self.slices[id(leaf)].of(whole)

    def _open(self) -> torch.Tensor:
        """Return the memory that the first shard has announced."""
        while self._mailbox.group_slab is None:
            self._peers.receive()
        number, offset, size, _ = self._mailbox.group_slab
        segment: Segment = self._peers.opened[self.leader, number]
        return segment.view(offset, size)

    def is_handed_over(self, gradients: Iterable[Any]) -> bool:
        """Return whether one of these gradients lies in the slab."""
        return any(id(one.parameter) in self.layout.parts for one in gradients)

    def release(self) -> list[Slab]:
        """Return the slab that has been taken, to be given back to the pool."""
        slab, self._slab, self._memory = self._slab, None, None
        return [] if slab is None else [slab]


def gather_slices(slices: Sequence[ParameterShard], group: ShardGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the leaves that have gradients with their whole gradients, in shard 0; all shards call it at once.

    The gradients on the leaves are gone afterwards.
    """
    assert isinstance(group, ExchangeGroup)
    own = torch.tensor([one.leaf.grad is not None for one in slices], dtype=torch.uint8)
    have = torch.stack([flags.clone() for flags in group.exchange(own, GATHER)]).amax(0).tolist()
    found = []
    for one, has in zip(slices, have, strict=True):
        if not has:
            continue
        grad = one.leaf.grad
        parts = group.exchange(torch.zeros_like(one.leaf) if grad is None else grad, GATHER)
        one.leaf.grad = None
        if group.rank == 0:
            whole = torch.empty_like(one.whole, requires_grad=False)
            for rank, part in enumerate(parts):
                parameter_slice(whole, one.layout, one.size, rank).copy_(part)
            found.append((one.leaf, whole))
    return found
