"""`analyse(graph, profile, partition)`: build the analysis of a partition.

stages ─► times, memory, parameters ─┐
transfers between stages ────────────┴─► simulated schedule ─► Analysis
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
from gemini.partition.analysis.analysis_result import Analysis, MemoryEstimate, StageAnalysis, WorkerAnalysis
from gemini.partition.analysis.stage_scopes import stage_scopes
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.partition.step_estimate import StageWork, StepEstimate, estimate_step, find_schedule
from gemini.partition.traffic import StageTransfer, count_worker_changes, find_transfers, stages_with_backward
from gemini.profiling.measured_device import MB
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import tensor_inputs, value_size
from gemini.profiling.profile_result import Profile
from gemini.schedule.link_costs import Links

__all__ = ["Analysis", "analyse"]

_NAMED = 6


def analyse(graph: Graph, profile: Profile, partition: Partition, options: Options | None = None) -> Analysis:
    """Analyse a partition on a profile; `options` default to those of the partition.

    The profile may differ from the one that the partition was computed on, for a fair comparison of partitions.
    """
    options = options if options is not None else Options.from_json(partition.options)
    find_schedule(options.schedule)
    partition.validate(graph)
    if {cost.id for cost in profile} != {node.id for node in graph.compute_nodes}:
        raise PartitionError("the profile does not match this graph\n    → profile(graph)")
    return _AnalysisBuilder(graph, profile, partition, options).run()


@dataclass(frozen=True)
class _AnalysisBuilder:
    graph: Graph
    profile: Profile
    partition: Partition
    options: Options

    def run(self) -> Analysis:
        transfers = find_transfers(
            self.graph, self.partition, [sum(c.backward_ms for c in costs) for costs in self.costs]
        )
        works = self._works(transfers)
        prediction = self._predict(works, transfers)
        workers = tuple(self._worker(at, works, transfers, prediction) for at in range(self.partition.nparts))
        speeds = [worker.speed for worker in self.workers]
        everything = sum(self._balanced_ms(cost) for costs in self.costs for cost in costs)
        single = self.profile.forward_ms if not any(work.has_backward for work in works) else sum(
            cost.forward_ms + self._backward_ms(cost) for costs in self.costs for cost in costs
        )  # fmt: skip
        return Analysis(
            model=self.partition.model,
            partitioner=self.partition.partitioner,
            device=self.profile.device,
            nparts=self.partition.nparts,
            stages=self._stages(works, transfers, prediction),
            workers=workers,
            flows=transfers,
            ideal_ms=everything / sum(speeds),
            single_ms=single / max(speeds),
            step_ms=prediction.step_ms,
            schedule=prediction.schedule,
            micro_batches=self.options.micro_batches,
            notes=tuple(self._notes(prediction)),
            facts=dict(self.partition.facts),
            graph=self.graph,
            plan=prediction.plan,
        )

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def costs(self) -> tuple[tuple[NodeCost, ...], ...]:
        """The costs of the nodes of each stage."""
        profile = self.profile.with_recomputation() if self.options.recompute else self.profile
        cost_of = {cost.id: cost for cost in profile}
        return tuple(tuple(cost_of[node] for node in nodes) for nodes in self.partition.stages)

    @cached_property
    def workers(self) -> Sequence[Any]:
        return self.options.workers_for(self.partition.nparts)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each parameter by name."""
        return {name: p.numel() for name, p in self.graph.bound_model().named_parameters()}

    @cached_property
    def trainable(self) -> frozenset[str]:
        return frozenset(name for name, p in self.graph.bound_model().named_parameters() if p.requires_grad)

    def _backward_ms(self, cost: NodeCost) -> float:
        return cost.backward_ms * self.options.ratio

    def _balanced_ms(self, cost: NodeCost) -> float:
        forward = 0.0 if self.options.weight == "backward" else cost.forward_ms
        return forward + (0.0 if self.options.weight == "forward" else self._backward_ms(cost))

    def _works(self, transfers: Sequence[StageTransfer]) -> list[StageWork]:
        """Return the work of each stage for one micro-batch."""
        micros = self.options.micro_batches
        has_backward = stages_with_backward(transfers, [sum(c.backward_ms for c in costs) for costs in self.costs])
        works = []
        for stage, costs in enumerate(self.costs):
            worker = self.partition.workers[stage]
            scale = 1 / (micros * self.workers[worker].speed)
            weight = sum(self._backward_ms(cost) * self._weight_share(cost) for cost in costs)
            sent = sum(transfer.forward_mb for transfer in transfers if transfer.source == stage)
            returned = sum(transfer.backward_mb for transfer in transfers if transfer.target == stage)
            around, sending = self.options.action_ms * micros, self.options.sending_ms
            works.append(
                StageWork(
                    worker,
                    forward_ms=(sum(cost.forward_ms for cost in costs) + around + sent * sending) * scale,
                    input_gradient_ms=(sum(map(self._backward_ms, costs)) - weight + around + returned * sending)
                    * scale,
                    weight_gradient_ms=weight * scale,
                    saved_mb=self.profile.saved_mb(costs) / micros,
                    has_backward=has_backward[stage],
                )
            )
        return works

    def _weight_share(self, cost: NodeCost) -> float:
        """Return the share of weight gradients in a node's backward: half for products, all without input gradients."""
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

    def _predict(self, works: Sequence[StageWork], transfers: Sequence[StageTransfer]) -> StepEstimate:
        free = [
            math.inf if worker.memory_mb is None else worker.memory_mb - self._memory(self._costs_of(at), 0.0).total_mb
            for at, worker in enumerate(self.workers)
        ]
        links = self.options.links
        return estimate_step(
            works, transfers, self.partition.nparts,
            schedule=self.options.schedule, nmicros=self.options.micro_batches,
            links=Links(links.latency) if self.options.sending_ms else links, ends=self._output_stages(),
            free_mb=free, time_limit=self.options.time_limit,
        )  # fmt: skip

    def _output_stages(self) -> list[int]:
        """Return the stages that produce model outputs."""
        stage_of = self.partition.stage_of
        return sorted({stage_of[ref.node] for ref in self.graph.outputs() if ref.node in stage_of})

    def _costs_of(self, worker: int) -> list[NodeCost]:
        return [
            cost for at, costs in zip(self.partition.workers, self.costs, strict=True) if at == worker for cost in costs
        ]

    def _memory(self, costs: Sequence[NodeCost], activations_mb: float) -> MemoryEstimate:
        names = {name for cost in costs for name in cost.parameters}
        trained = sum(self.profile.parameters_mb[name] for name in names & self.trainable)
        peak = max((max(cost.forward_peak_mb, cost.backward_peak_mb) for cost in costs), default=0.0)
        return MemoryEstimate(
            weights_mb=sum(self.profile.parameters_mb[name] for name in names),
            gradients_mb=trained,
            optimizer_mb=trained * self.options.optimizer_copies,
            activations_mb=activations_mb,
            working_mb=peak / self.options.micro_batches,
        )

    # ── stages and workers ───────────────────────────────────────────────────────────────────────────────────────────
    def _stages(
        self, works: Sequence[StageWork], transfers: Sequence[StageTransfer], prediction: StepEstimate
    ) -> tuple[StageAnalysis, ...]:
        names = [{name for cost in costs for name in cost.parameters} for costs in self.costs]
        scopes = stage_scopes(self.graph, self.partition, {cost.id: cost.ms for cost in self.profile})
        changes = count_worker_changes(transfers, len(works))
        outputs = set(self.graph.outputs())
        found = []
        for at, work in enumerate(works):
            elsewhere = set().union(*(other for place, other in enumerate(names) if place != at))
            own = names[at] & set(self.sizes)
            incoming = [transfer for transfer in transfers if transfer.target == at]
            outgoing = [transfer for transfer in transfers if transfer.source == at]
            found.append(
                StageAnalysis(
                    stage=at,
                    worker=work.worker,
                    scopes=scopes[at],
                    nodes=self.partition.stages[at],
                    forward_ms=work.forward_ms * self.options.micro_batches,
                    backward_ms=(work.input_gradient_ms + work.weight_gradient_ms) * self.options.micro_batches,
                    memory=self._memory(self.costs[at], prediction.stage_activations_mb[at]),
                    depth=prediction.depth[at],
                    parameters=sum(self.sizes[name] for name in own),
                    parameters_mb=sum(self.profile.parameters_mb[name] for name in own),
                    shared=tuple(sorted(own & elsewhere)),
                    in_mb=sum(transfer.forward_mb for transfer in incoming),
                    out_mb=sum(transfer.forward_mb for transfer in outgoing),
                    returned_mb=sum(transfer.backward_mb for transfer in outgoing),
                    sent_back_mb=sum(transfer.backward_mb for transfer in incoming),
                    input_mb=self._input_mb(at),
                    result_mb=sum(value_size(self.graph, ref) for ref in outputs if self._is_in(ref, at)) / MB,
                    hops=changes[at],
                )
            )
        return tuple(found)

    def _is_in(self, ref: Ref, stage: int) -> bool:
        return self.partition.stage_of.get(ref.node) == stage

    def _input_mb(self, stage: int) -> float:
        nodes = [self.graph.nodes[node] for node in self.partition.stages[stage]]
        read = {ref for node in nodes for ref in tensor_inputs(node) if self.graph.nodes[ref.node].kind == "input"}
        return sum(value_size(self.graph, ref) for ref in read) / MB

    def _worker(
        self, at: int, works: Sequence[StageWork], transfers: Sequence[StageTransfer], prediction: StepEstimate
    ) -> WorkerAnalysis:
        stages = tuple(stage for stage, work in enumerate(works) if work.worker == at)
        costs, worker = self._costs_of(at), self.workers[at]
        return WorkerAnalysis(
            worker=at,
            stages=stages,
            speed=worker.speed,
            forward_ms=sum(cost.forward_ms for cost in costs) / worker.speed,
            backward_ms=sum(map(self._backward_ms, costs)) / worker.speed,
            load_ms=sum(map(self._balanced_ms, costs)) / worker.speed,
            transfer_ms=sum(
                transfer.transfer_ms(self.options.links, works[transfer.source].worker, at, self.options.micro_batches)
                for transfer in transfers
                if transfer.target in stages
            ),
            idle=prediction.idle[at],
            memory=self._memory(costs, prediction.activations_mb[at]),
            limit_mb=worker.memory_mb,
        )

    def _notes(self, prediction: StepEstimate) -> Iterable[str]:
        if prediction.note:
            yield prediction.note
        if "more_stages" in self.partition.facts:
            yield str(self.partition.facts["more_stages"])
        yield from self._tied_notes()
        estimated = [cost for cost in self.profile if cost.source != "measured"]
        if estimated and self.profile.mode == "measured":
            yield f"{len(estimated)} nodes are estimated, not measured: {estimated[0].reason}"

    def _tied_notes(self) -> Iterable[str]:
        """Report parameters that several stages use, and those on several workers."""
        places: dict[str, set[int]] = {}
        for stage, costs in enumerate(self.costs):
            for cost in costs:
                for name in cost.parameters:
                    if name in self.sizes:
                        places.setdefault(name, set()).add(stage)
        shared = {name: stages for name, stages in sorted(places.items()) if len(stages) > 1}
        apart = [name for name, stages in shared.items() if len({self.partition.workers[at] for at in stages}) > 1]
        if shared:
            yield f"* parameters used by several stages: {_list_names(list(shared))}"
        trained = [name for name in apart if name in self.trainable]
        if trained:
            yield f"parameters on several workers, whose gradients are summed: {_list_names(trained)}"


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
