"""Sharded pieces: the forward part over the shards of each stage, then over micro-batches.

    forward part  ── first: pieces per shard ──→  the same, more ops, per shard and stage
                  ── second: pieces per micro-batch ──→  what the twin runs

Both are the same rewriting with other layouts. The ops of the first are what the second rewrites: a gradient of the
result is that of the weights of the script, since every shard takes its slice of the weight as it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gemini.tensorflow.forward_facts import ForwardFacts, forward_ops, read_facts
from gemini.tensorflow.forward_pieces import ForwardPieces
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.piece_layouts import Shape
from gemini.tensorflow.sharded_variables import shard_name
from gemini.tensorflow.split_plan import BatchSource, SplitPlan, SplitRefused, plan_split
from gemini.tensorflow.stage_cut import StagePlacement


class ShardedPieces:
    """The pieces of all tensors of the script, over shards and micro-batches."""

    def __init__(  # noqa: PLR0917
        self, facts: ForwardFacts, plan: SplitPlan, writer: NodeWriter, mirror: Any, placement: StagePlacement,
        sources: Mapping[str, BatchSource], micro_batches: int, stored: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self._facts, self._writer, self._placement = facts, writer, placement
        self._sources, self._micro_batches, self._mirror = sources, micro_batches, mirror
        self._prefix = f"{writer.prefix}shards/"
        self._block_name = re.compile(re.escape(self._prefix) + r"[FDW]\d*/S(\d+)/")
        self.first = ForwardPieces(facts, plan, NodeWriter(writer.graph, self._prefix), placement)
        for name in stored:
            parts = [shard_name(name.partition(":")[0], shard) + ":0" for shard in range(plan.count)]
            self.first.add_pieces(name, parts)
        self.first.device_of_piece = lambda stage, piece: placement.shards[stage][piece]
        self.second: ForwardPieces | None = None
        self._joined: dict[str, str] = {}  # tensors that were whole before the second rewriting

    # ── as of forward pieces ───────────────────────────────────────────────────────────────────────────────────────
    @property
    def random(self) -> list[str]:
        """The random numbers that are drawn for the whole batch."""
        return self.first.random

    @property
    def random_shapes(self) -> dict[str, Any]:
        """Sizes of random numbers that steps feed."""
        return self.first.random_shapes

    @property
    def plan(self) -> SplitPlan:
        """The plan of the micro-batches."""
        if self.second is None:
            raise SplitRefused("nothing is written yet")
        return self.second.plan

    @property
    def all_reduces(self) -> int:
        """Sums over shards of one micro-batch, forward, and backward where a whole tensor is read by all shards."""
        return len(self.first.sums) + len(self.first.shared)

    @property
    def gathers(self) -> int:
        """Concatenations over shards of one micro-batch."""
        return len(self.first.gathered)

    def is_known(self, name: str) -> bool:
        """Whether the tensor belongs to the forward part."""
        return self.first.is_known(name)

    def whole(self, name: str) -> str:
        """Return the whole tensor."""
        if self.second is None:
            raise SplitRefused("nothing is written yet")
        if name in self._joined:
            return self.second.whole(self._joined[name])
        return self.first.whole(name)

    def write(self, losses: Sequence[str]) -> None:
        """Write the pieces per shard, then those per micro-batch."""
        self.first.write(losses)
        graph = self._writer.graph
        names = [self.first.whole(name) for name in losses]
        self.first.flush()
        tensors = [graph.get_tensor_by_name(name) for name in names]
        sources = self._second_sources()
        ops = forward_ops(tensors, sources)
        if ops is None:
            raise SplitRefused("the shards form a loop")
        used = {tensor.name for op in ops for tensor in op.inputs}
        sources = {name: source for name, source in sources.items() if name in used}
        shapes = {name: source.shape for name, source in sources.items()}
        facts = read_facts(self._mirror.complete(ops), shapes, self._mirror.library)
        plan = plan_split(facts, sources, self._micro_batches)
        self.second = ForwardPieces(facts, plan, self._writer, self._place)
        self._joined = self.first.joined
        self.second.write(losses=[tensor.name for tensor in tensors])
        self.first.continue_with(self._writer, self.second.whole)

    def _second_sources(self) -> dict[str, BatchSource]:
        """Return the sources of the second rewriting: those of the step, and the random numbers of the whole batch."""
        found = dict(self._sources)
        for name in self.first.random:
            shape: Shape | None = self._facts.shape_of[name]
            if shape is None:
                raise SplitRefused(f"the size of the random numbers {name} is unknown")
            found[name] = BatchSource(shape, votes=False)
        return found

    def _place(self, name: str) -> tuple[int, str]:
        """Return the stage and the device of an op of the first rewriting, or of the script."""
        if name in self._placement.stage_of:
            return self._placement(name)
        device = str(self._writer.graph.get_operation_by_name(name).device)
        found = self._block_name.match(name)
        if found is not None:
            return int(found[1]), device
        stage = next((at for at, shards in enumerate(self._placement.shards) if device in shards), 0)
        return stage, device
