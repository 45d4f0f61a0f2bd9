"""`analyse(graph, profile, partition)`: from a partition to its analysis.

stages ─► times, memory, parameters ─┐
flows between them ──────────────────┴─► prediction under the schedule ─► Analysis
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.partition.analysis.analysis_result import Analysis, Memory, StageAnalysis, WorkerAnalysis
from gemini.partition.analysis.stage_scopes import stage_scopes
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.partition.step_estimate import Prediction, Work, find_schedule, predict
from gemini.partition.traffic import Flow, find_flows, hops_to, learning_stages
from gemini.profiling.measured_device import MB
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import tensor_inputs, value_size
from gemini.profiling.profile_result import Profile
from gemini.schedule.link_costs import Links

__all__ = ["Analysis", "analyse"]

_NAMED = 6


def analyse(graph: Graph, profile: Profile, partition: Partition, options: Options | None = None) -> Analysis:
    """What a partition costs on this profile; `options` are those it was made with unless others are given.

    The profile may be another than the one the partition was made on: that is how a partition is judged.
    """
    options = options if options is not None else Options.from_json(partition.options)
    find_schedule(options.schedule)
    partition.validate(graph)
    if {cost.id for cost in profile} != {node.id for node in graph.compute_nodes}:
        raise PartitionError("the profile is not of this graph\n    → profile(graph)")
    return _Analysing(graph, profile, partition, options).run()


@dataclass(frozen=True)
class _Analysing:
    graph: Graph
    profile: Profile
    partition: Partition
    options: Options

    def run(self) -> Analysis:
        flows = find_flows(self.graph, self.partition, [sum(c.backward_ms for c in costs) for costs in self.costs])
        works = self._works(flows)
        prediction = self._predict(works, flows)
        workers = tuple(self._worker(at, works, flows, prediction) for at in range(self.partition.nparts))
        speeds = [worker.speed for worker in self.workers]
        everything = sum(self._balanced(cost) for costs in self.costs for cost in costs)
        alone = self.profile.forward_ms if not any(work.learns for work in works) else sum(
            cost.forward_ms + self._backward(cost) for costs in self.costs for cost in costs
        )  # fmt: skip
        return Analysis(
            model=self.partition.model,
            partitioner=self.partition.partitioner,
            device=self.profile.device,
            nparts=self.partition.nparts,
            stages=self._stages(works, flows, prediction),
            workers=workers,
            flows=flows,
            ideal_ms=everything / sum(speeds),
            single_ms=alone / max(speeds),
            step_ms=prediction.step_ms,
            schedule=prediction.schedule,
            micro_batches=self.options.micro_batches,
            notes=tuple(self._notes(prediction)),
            facts=dict(self.partition.facts),
            graph=self.graph,
            plan=prediction.plan,
        )

    # ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def costs(self) -> tuple[tuple[NodeCost, ...], ...]:
        """The costs of the nodes of each stage."""
        profile = self.profile.with_recomputation() if self.options.recompute else self.profile
        cost_of = {cost.id: cost for cost in profile}
        return tuple(tuple(cost_of[node] for node in nodes) for nodes in self.partition.stages)

    @cached_property
    def workers(self) -> Sequence[Any]:
        return self.options.of(self.partition.nparts)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of trainable and frozen parameters by name."""
        return {name: p.numel() for name, p in self.graph.bound_model().named_parameters()}

    @cached_property
    def trainable(self) -> frozenset[str]:
        return frozenset(name for name, p in self.graph.bound_model().named_parameters() if p.requires_grad)

    def _backward(self, cost: NodeCost) -> float:
        return cost.backward_ms * self.options.ratio

    def _balanced(self, cost: NodeCost) -> float:
        forward = 0.0 if self.options.weight == "backward" else cost.forward_ms
        return forward + (0.0 if self.options.weight == "forward" else self._backward(cost))

    def _works(self, flows: Sequence[Flow]) -> list[Work]:
        """Each stage for one micro-batch."""
        micros = self.options.micro_batches
        learns = learning_stages(flows, [sum(c.backward_ms for c in costs) for costs in self.costs])
        works = []
        for stage, costs in enumerate(self.costs):
            worker = self.partition.workers[stage]
            scale = 1 / (micros * self.workers[worker].speed)
            weight = sum(self._backward(cost) * self._weight_share(cost) for cost in costs)
            sent = sum(flow.forward_mb for flow in flows if flow.source == stage)
            returned = sum(flow.backward_mb for flow in flows if flow.target == stage)
            around, sending = self.options.action_ms * micros, self.options.sending_ms
            works.append(
                Work(
                    worker,
                    forward_ms=(sum(cost.forward_ms for cost in costs) + around + sent * sending) * scale,
                    input_gradient_ms=(sum(map(self._backward, costs)) - weight + around + returned * sending) * scale,
                    weight_gradient_ms=weight * scale,
                    kept_mb=self._kept(costs) / micros,
                    learns=learns[stage],
                )
            )
        return works

    def _weight_share(self, cost: NodeCost) -> float:
        """How much of a node's backward is the gradient of weights: of products half, without gradient input all."""
        if not self.trainable.intersection(cost.parameters):
            return 0.0
        if cost.weight_share is not None:
            return cost.weight_share
        node = self.graph.nodes[cost.id]
        return 0.5 if any(self._has_gradient(ref) for ref in tensor_inputs(node)) else 1.0

    def _has_gradient(self, ref: Ref) -> bool:
        source = self.graph.nodes[ref.node]
        meta = source.outputs.get((ref.source, ref.path))
        return source.kind != "parameter" and meta is not None and meta.requires_grad

    def _kept(self, costs: Iterable[NodeCost]) -> float:
        return self.profile.saved_mb(costs)

    def _predict(self, works: Sequence[Work], flows: Sequence[Flow]) -> Prediction:
        free = [
            math.inf if worker.memory_mb is None else worker.memory_mb - self._memory(self._costs_of(at), 0.0).total_mb
            for at, worker in enumerate(self.workers)
        ]
        links = self.options.links
        return predict(
            works, flows, self.partition.nparts,
            schedule=self.options.schedule, nmicros=self.options.micro_batches,
            links=Links(links.latency) if self.options.sending_ms else links, ends=self._ends(),
            free_mb=free, time_limit=self.options.time_limit,
        )  # fmt: skip

    def _ends(self) -> list[int]:
        """The stages that make outputs of the model."""
        stage_of = self.partition.stage_of
        return sorted({stage_of[ref.node] for ref in self.graph.outputs() if ref.node in stage_of})

    def _costs_of(self, worker: int) -> list[NodeCost]:
        return [
            cost for at, costs in zip(self.partition.workers, self.costs, strict=True) if at == worker for cost in costs
        ]

    def _memory(self, costs: Sequence[NodeCost], activations_mb: float) -> Memory:
        names = {name for cost in costs for name in cost.parameters}
        learnt = sum(self.profile.parameters_mb[name] for name in names & self.trainable)
        peak = max((max(cost.forward_peak_mb, cost.backward_peak_mb) for cost in costs), default=0.0)
        return Memory(
            weights_mb=sum(self.profile.parameters_mb[name] for name in names),
            gradients_mb=learnt,
            optimizer_mb=learnt * self.options.optimizer_copies,
            activations_mb=activations_mb,
            working_mb=peak / self.options.micro_batches,
        )

    # ── stages and workers ─────────────────────────────────────────────────────────────────────────────────────
    def _stages(
        self, works: Sequence[Work], flows: Sequence[Flow], prediction: Prediction
    ) -> tuple[StageAnalysis, ...]:
        names = [{name for cost in costs for name in cost.parameters} for costs in self.costs]
        scopes = stage_scopes(self.graph, self.partition, {cost.id: cost.ms for cost in self.profile})
        hops = hops_to(flows, len(works))
        results = set(self.graph.outputs())
        found = []
        for at, work in enumerate(works):
            elsewhere = set().union(*(other for place, other in enumerate(names) if place != at))
            own = names[at] & set(self.sizes)
            into = [flow for flow in flows if flow.target == at]
            out = [flow for flow in flows if flow.source == at]
            found.append(
                StageAnalysis(
                    stage=at,
                    worker=work.worker,
                    scopes=scopes[at],
                    nodes=self.partition.stages[at],
                    forward_ms=work.forward_ms * self.options.micro_batches,
                    backward_ms=(work.input_gradient_ms + work.weight_gradient_ms) * self.options.micro_batches,
                    memory=self._memory(self.costs[at], prediction.kept_mb[at]),
                    depth=prediction.depth[at],
                    parameters=sum(self.sizes[name] for name in own),
                    parameters_mb=sum(self.profile.parameters_mb[name] for name in own),
                    shared=tuple(sorted(own & elsewhere)),
                    in_mb=sum(flow.forward_mb for flow in into),
                    out_mb=sum(flow.forward_mb for flow in out),
                    returned_mb=sum(flow.backward_mb for flow in out),
                    sent_back_mb=sum(flow.backward_mb for flow in into),
                    input_mb=self._input_mb(at),
                    result_mb=sum(value_size(self.graph, ref) for ref in results if self._is_in(ref, at)) / MB,
                    hops=hops[at],
                )
            )
        return tuple(found)

    def _is_in(self, ref: Ref, stage: int) -> bool:
        return self.partition.stage_of.get(ref.node) == stage

    def _input_mb(self, stage: int) -> float:
        nodes = [self.graph.nodes[node] for node in self.partition.stages[stage]]
        read = {ref for node in nodes for ref in tensor_inputs(node) if self.graph.nodes[ref.node].kind == "input"}
        return sum(value_size(self.graph, ref) for ref in read) / MB

    def _worker(self, at: int, works: Sequence[Work], flows: Sequence[Flow], prediction: Prediction) -> WorkerAnalysis:
        mine = tuple(stage for stage, work in enumerate(works) if work.worker == at)
        costs, worker = self._costs_of(at), self.workers[at]
        return WorkerAnalysis(
            worker=at,
            stages=mine,
            speed=worker.speed,
            forward_ms=sum(cost.forward_ms for cost in costs) / worker.speed,
            backward_ms=sum(map(self._backward, costs)) / worker.speed,
            load_ms=sum(map(self._balanced, costs)) / worker.speed,
            transfer_ms=sum(
                flow.transfer_ms(self.options.links, works[flow.source].worker, at, self.options.micro_batches)
                for flow in flows
                if flow.target in mine
            ),
            idle=prediction.idle[at],
            memory=self._memory(costs, prediction.held_mb[at]),
            limit_mb=worker.memory_mb,
        )

    def _notes(self, prediction: Prediction) -> Iterable[str]:
        if prediction.note:
            yield prediction.note
        yield from self._tied()
        estimated = [cost for cost in self.profile if cost.source != "measured"]
        if estimated and self.profile.mode == "measured":
            yield f"{len(estimated)} nodes are estimated, not measured: {estimated[0].reason}"

    def _tied(self) -> Iterable[str]:
        """Parameters that several stages use, and whether these are on several workers."""
        places: dict[str, set[int]] = {}
        for stage, costs in enumerate(self.costs):
            for cost in costs:
                for name in cost.parameters:
                    if name in self.sizes:
                        places.setdefault(name, set()).add(stage)
        shared = {name: stages for name, stages in sorted(places.items()) if len(stages) > 1}
        apart = [name for name, stages in shared.items() if len({self.partition.workers[at] for at in stages}) > 1]
        if shared:
            yield f"* used by several stages: {_listed(list(shared))}"
        learnt = [name for name in apart if name in self.trainable]
        if learnt:
            yield f"on several workers, gradients to be summed: {_listed(learnt)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
