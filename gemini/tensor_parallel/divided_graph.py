"""Divided graph: the graph that every shard runs, by stage, and what it has in common with the captured one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from gemini.ir.def_use import rewrite_refs
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.ir.symint import Expr
from gemini.tensor_parallel.layouts import move_collectives
from gemini.tensor_parallel.shard_plan import DIVIDED_RECURRENCE, InnerCollective, ShardPlan

StageCollectives: TypeAlias = tuple[dict[str, int], dict[str, int]]
MOVE = "gemini.collectives.value_moves.move"


@dataclass(frozen=True)
class LocalGraph:
    """The graph of a shard, its nodes by stage, and the local node of each original one."""

    graph: Graph
    stages: tuple[tuple[int, ...], ...]
    node_of: Mapping[int, int]
    moved: Mapping[int, Ref]  # by the node of a move: the value that it converts

    def original(self, value: Any) -> Any:
        """Return the value of the original graph whose version, or part, this one is; an expression of such values."""
        if isinstance(value, Ref) and value.node in self.moved:
            return self.moved[value.node]
        if isinstance(value, Ref):
            return Ref(self._sources[value.node], value.source, value.path)
        return rewrite_refs(value, self.original) if isinstance(value, Expr) else value

    @cached_property
    def _sources(self) -> dict[int, int]:
        return {own: node for node, own in self.node_of.items()}

    def collectives(self, plan: ShardPlan, needed: Collection[int]) -> list[StageCollectives | None]:
        """Return the collectives of each stage on one micro-batch, forward and at most backward, by name.

        None for a stage with recurrent layers, whose collectives are as many as an input has steps. A backward repeats
        those of recomputed nodes, as far as it needs their results. `needed` are the nodes of which a stage has code.
        """
        inner = {self.node_of[one.node]: one.collectives for one in plan.nodes if one.collectives}
        recurrent = {self.node_of[one.node] for one in plan.nodes if one.local == DIVIDED_RECURRENCE}
        return [
            None if recurrent.intersection(stage) else self._count([at for at in stage if at in needed], inner)
            for stage in self.stages
        ]

    def _count(self, stage: Iterable[int], inner: Mapping[int, tuple[InnerCollective, ...]]) -> StageCollectives:
        forward, backward = Counter[str](), Counter[str]()
        for at in stage:
            node = self.graph.nodes[at]
            if node.target == MOVE:
                have, want = (form.value for form in node.args.items[1:3])  # type: ignore[union-attr]
                names = move_collectives(have, want, self.graph.meta(Ref(at)).requires_grad)
                forward[names[0]] += 1
                backward[names[1]] += 1
                backward[names[0]] += node.recomputed > 0
            for one in inner.get(at, ()):
                (forward if one.phase == "forward" else backward)[one.name] += one.times
                if node.recomputed and one.phase == "forward":
                    backward[one.name] += one.times
        del forward[""], backward[""]
        return dict(forward), dict(backward)
