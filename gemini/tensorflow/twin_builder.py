"""Twin builder: the stages, the twin and its report for one configuration, in graphs of sessions and of functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.tensorflow.block_order import order_blocks
from gemini.tensorflow.forward_facts import ForwardFacts, forward_ops, read_facts
from gemini.tensorflow.gradient_notes import GradientNote
from gemini.tensorflow.graph_branches import take_branches
from gemini.tensorflow.piece_layouts import Shape
from gemini.tensorflow.servers import Servers
from gemini.tensorflow.shard_ways import ShardRequest, plan_shards
from gemini.tensorflow.sharded_pieces import ShardedPieces
from gemini.tensorflow.split_plan import BatchSource, SplitRefused, plan_split
from gemini.tensorflow.stage_cut import CutRequest, StagePlacement, cut_stages
from gemini.tensorflow.stage_schedule import stage_schedule
from gemini.tensorflow.twin_graph import TwinGraph
from gemini.tensorflow.twin_report import TwinReport, WorkerShare

_TWINS = "_gemini_twins"
NOTHING_TAKEN: Mapping[str, bool] = {}


class TwinBuilder:
    """Makes the twins next to a mirror; `placement` has no op until stages are cut."""

    def __init__(self, config: GeminiConfig, servers: Servers, mirror: Any) -> None:
        self._config, self._mirror = config, mirror
        names = servers.devices.names
        self._schedule = stage_schedule(config, len(names))
        shards = tuple(names[device] for device in self._schedule.device_of)
        self.placement = StagePlacement({}, tuple(one[0] for one in shards), shards)

    @property
    def shard_request(self) -> ShardRequest | None:
        """What to divide in every stage; None where stages have one device each."""
        if not self.placement.is_sharded:
            return None
        counts = {len(one) for one in self.placement.shards}
        if len(counts) > 1:
            raise SplitRefused(f"stages with different numbers of shards: {sorted(counts)}")
        return ShardRequest(counts.pop(), self._config.sharding_dim)

    def cut(self, facts: ForwardFacts) -> None:
        """Place the ops of a forward part on the stages."""
        limit = self._config.memory_limit
        request = CutRequest(
            len(self.placement.devices), self._config.partitioner, self._schedule.micro_batches,
            None if limit is None else limit / (1 << 20), self._config.seed,
        )  # fmt: skip
        self.placement = replace(self.placement, stage_of=cut_stages(facts, request))

    def build(
        self, notes: Sequence[GradientNote], facts: ForwardFacts, sources: Mapping[str, BatchSource],
        fed: Iterable[str], report: TwinReport,
    ) -> tuple[TwinGraph, TwinReport]:  # fmt: skip
        """Return the twin of a step that takes in `fed`, and its completed report; raises SplitRefused."""
        began = time.perf_counter()
        mirror, number = self._mirror, len(twins_of(self._mirror.graph))
        placement, count = self.placement, self._schedule.micro_batches
        plan = plan_split(facts, sources, count)
        twin = TwinGraph(mirror, notes, facts, plan, placement, frozenset(fed), number)
        if (request := self.shard_request) is not None:
            reads = {} if mirror.variables is None else mirror.variables.reads
            stored = {name: layout for name, layout in reads.items() if name in facts.shape_of}
            try:
                twin.shard(plan_shards(facts, request, stored), sources, count, stored)
            except SplitRefused:
                if len(placement.devices) == 1:
                    raise  # there are stages at least, otherwise
        twin.build()
        schedule = order_blocks(twin, mirror.graph, self._schedule)
        ops = twin.count_ops()
        shares = tuple(
            WorkerShare(device, stage, shard, ops[device])
            for stage, devices in enumerate(placement.shards)
            for shard, device in enumerate(devices)
        )
        report = replace(
            report, stages=len(placement.devices), micro_batches=twin.plan.count, schedule=schedule, workers=shares,
        )  # fmt: skip
        if isinstance(twin.pieces, ShardedPieces):
            made = twin.pieces
            shards = max(map(len, placement.shards))
            report = replace(report, shards=shards, all_reduces=made.all_reduces, gathers=made.gathers)
        setattr(mirror.graph, _TWINS, (*twins_of(mirror.graph), twin))
        return twin, replace(report, build_seconds=time.perf_counter() - began)


def twins_of(graph: Any) -> tuple[TwinGraph, ...]:
    """Return the twins that a graph contains."""
    return getattr(graph, _TWINS, ())


def forward_facts(
    losses: Sequence[Any], sources: Mapping[str, Shape], mirror: Any, taken: Mapping[str, bool] = NOTHING_TAKEN
) -> ForwardFacts:
    """Return the facts of the ops from sources of these shapes to losses; raises SplitRefused for a loop of ops.

    `taken` has the predicates of conditionals that are known, by name.
    """
    ops = forward_ops(losses, sources)
    if ops is None:
        raise SplitRefused("the forward part has a loop of single ops (control flow of version 1)")
    if taken:
        ops = _keep_needed(take_branches(ops, taken, mirror.graph), {loss.name for loss in losses})
    return read_facts(mirror.complete(ops), sources, mirror.library)


def _keep_needed(ops: list[Any], needed: set[str]) -> list[Any]:
    """Return the ops without those that only another branch reads."""
    kept = []
    for op in reversed(ops):
        if any(one.name in needed for one in op.outputs):
            kept.append(op)
            needed.update(one.name for one in op.inputs)
    return kept[::-1]
