"""Step plan: the stages of a model, their workers, and the order in which micro-batches run through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.batch_analysis.graph_analysis import GraphKinds
    from gemini.capture.attribute_writes import AttributeWrite
    from gemini.capture.batch_dim import BatchLayout
    from gemini.codegen.stage_interface import Port
    from gemini.ir.graph import Graph
    from gemini.parallel_program.compiled_plans import CompiledPlans
    from gemini.partition.analysis.analysis_result import Analysis
    from gemini.partition.assignment import Partition
    from gemini.pipe.piped_model import Piped
    from gemini.planner.tail_plan import TailNodes
    from gemini.profiling.profile_result import Profile
    from gemini.random_numbers.random_branches import RandomBranches
    from gemini.random_numbers.rng_recorder import RandomOpPattern
    from gemini.schedule.schedplan import SchedPlan
    from gemini.tensor_parallel.divided_graph import LocalGraph
    from gemini.tensor_parallel.shard_plan import ShardPlan


ONE_MICRO_BATCH = "one micro-batch was requested"


class UnplannableError(Exception):
    """A model cannot be planned; the message is the reason for the user."""


class CoupledSamplesError(UnplannableError):
    """A part of the model, which may be its end, couples samples."""


@dataclass(frozen=True)
class MeasuredSteps:
    """The schedule of a plan with the measured times of some of its steps."""

    schedule: SchedPlan
    step_ms: float
    steps: int


@dataclass(frozen=True)
class StepPlan:
    """Everything that is fixed for calls of one kind.

    `batch` has the sample dimension of each tensor of the call, `forms` that of each value of the graph.
    """

    graph: Graph
    profile: Profile
    partition: Partition
    analysis: Analysis
    schedule: SchedPlan
    name: str  # of the schedule
    micro_batches: int
    batch: BatchLayout
    forms: GraphKinds
    rng_patterns: tuple[tuple[RandomOpPattern, ...], ...]  # per stage; empty: workers use their own generators
    branches: RandomBranches | None = None  # on random numbers: the plan is for one outcome
    buffers_written_once: tuple[tuple[int, ...], ...] = ()  # per step: of each stage, the indices of its buffers
    single_micro_batch_reason: str = ""  # why the batch is not split
    tail: TailNodes | None = None  # nodes that process the whole batch, as the loss then does
    captured_parts: float = 1.0  # calls like the captured one that make up a batch
    recompute: bool = False  # stages recompute their activations in backward, to save memory
    is_cached: bool = False  # from the cache of an earlier run
    shards: ShardPlan | None = None  # how the shards of every stage divide it; None: each stage is on one worker
    node_rng: Mapping[int, tuple[RandomOpPattern, ...]] = field(default_factory=dict)  # of divided stages, by node
    unsharded_reason: str = ""  # why stages are not divided, where that was requested
    measured: MeasuredSteps | None = None  # after some steps
    resized_from: StepPlan | None = None  # the plan for another size whose stages it runs
    program: CompiledPlans | None = None  # whose stage files replace generated text
    _built: dict[frozenset[int], Piped] = field(default_factory=dict, repr=False)

    @property
    def nstages(self) -> int:
        """The number of stages that run per micro-batch."""
        return self.partition.nstages - (self.tail is not None and bool(self.tail.nodes))

    @property
    def step_ms(self) -> float:
        """The predicted time of a step: from measured steps, else from the profile."""
        return self.analysis.step_ms if self.measured is None else self.measured.step_ms

    @property
    def expected(self) -> SchedPlan:
        """The schedule with the predicted times of its actions."""
        return self.schedule if self.measured is None else self.measured.schedule

    def can_split(self, samples: int, micro_batches: int) -> bool:
        """Return whether the plan applies to a batch of `samples`, split into at most `micro_batches` micro-batches."""
        if self.single_micro_batch_reason:
            return samples == 1 or self.batch.size > 1
        if self.graph.rolled:
            return samples == self.graph.rolled * (self.graph.batch_size or 1)
        return max(1, min(samples // self.forms.least, micro_batches)) == self.micro_batches

    @property
    def writes_buffers(self) -> bool:
        """Whether a step writes buffers."""
        return bool(self.buffers_written_once or self.forms.own_statistics)

    @cached_property
    def uses_torch_rng(self) -> bool:
        """Whether a step uses a generator of torch."""
        from gemini.batch_analysis.precompute import uses_host_rng

        return any(node.random and not uses_host_rng(self.graph, node) for node in self.graph.nodes)

    @cached_property
    def attribute_writes(self) -> tuple[AttributeWrite, ...]:
        """The attributes that a call writes; the graph returns their values."""
        from gemini.capture.attribute_writes import returned_writes

        return returned_writes(self.graph)

    @cached_property
    def returned_sources(self) -> dict[int, int]:
        """The sources that the graph returns unchanged: index among its outputs → node."""
        found = enumerate(self.graph.outputs())
        return {at: ref.node for at, ref in found if self.graph.nodes[ref.node].is_source}

    @cached_property
    def uses_host_rng(self) -> bool:
        """Whether a step uses the generator of Python or NumPy."""
        from gemini.batch_analysis.precompute import uses_host_rng

        return any(uses_host_rng(self.graph, node) for node in self.graph.nodes)

    def build(self, shares: Iterable[int] = ()) -> Piped:
        """Return the live stages; values at the nodes `shares` are multiplied by the weight of the micro-batch."""
        wanted = frozenset(shares)
        if wanted not in self._built and self.resized_from is not None:
            built = self.resized_from.build(wanted)
            same = self.shards is None  # local ops do not run in the controller
            self._built[wanted] = built.with_graph(self.graph) if same else built.with_call_guard(self.graph)
        if wanted not in self._built:
            from gemini.pipe.piped_model import build_piped
            from gemini.pipe.stage_guards import CallGuard

            graph, partition, nodes = self.graph, self.partition, {node: node for node in wanted}
            if self.local is not None:
                graph, nodes = self.local.graph, {node: self.local.node_of[node] for node in wanted}
                partition = replace(partition, stages=self.local.stages)
            numbered = {nodes[node]: at for at, node in enumerate(sorted(wanted))}
            is_local = graph is not self.graph
            replace_sources = None if self.program is None else self.program.replace_sources
            built = self._built[wanted] = build_piped(graph, self.profile, partition, numbered, replace_sources)
            if is_local:  # local ops do not run in the controller
                built.call_guard = CallGuard(self.graph)
        return self._built[wanted]

    @cached_property
    def local(self) -> LocalGraph | None:
        """The graph that every shard runs; None where stages are not divided."""
        if self.shards is None:
            return None
        from gemini.tensor_parallel.local_graph import local_graph

        return local_graph(self.graph, self.shards, self.partition.stage_of, self.single_stages)

    @property
    def shard_count(self) -> int:
        """The number of workers per device of the schedule."""
        return 1 if self.shards is None or self.has_groups else self.shards.size

    @cached_property
    def has_groups(self) -> bool:
        """Whether the schedule has blocks on several devices at once: only the stages of these are divided."""
        return any(len(self.schedule.device(block)) > 1 for block in self.schedule)

    @property
    def single_stages(self) -> frozenset[int]:
        """The stages on one device, where the schedule has others on several."""
        if not self.has_groups:
            return frozenset()
        schedule = self.schedule
        return frozenset(block.stage or 0 for block in schedule if len(schedule.device(block)) == 1)

    @property
    def nworkers(self) -> int:
        """The number of workers: every device of the schedule is one per shard."""
        return self.schedule.ndevs * self.shard_count

    def output_ports(self, piped: Piped) -> list[Port | None]:
        """Return the ports of the model's outputs, in its order; None where the caller already has the tensor."""
        pairs = zip(self.graph.outputs(), piped.graph.outputs(), strict=True)
        return [None if self.graph.nodes[ref.node].is_source else piped.routes.results[own] for ref, own in pairs]

    def edited_stages(self) -> tuple[Piped, tuple[str, ...]] | None:
        """Return the stages of a compiled program, where their files were edited, with the names of these."""
        for one in () if self.program is None else self.program.found:
            if one.edited and (piped := self.build(one.facts.shares)).folder == one.folder:
                return piped, one.edited
        return None

    def edited_in_process(self) -> Piped | None:
        """Return the edited stages that replace the model in this process: ops of shards run in workers only."""
        found = None if self.shards is not None else self.edited_stages()
        return found and found[0]

    @property
    def micro_batches_text(self) -> str:
        """The number of micro-batches, as text."""
        return "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"

    def __str__(self) -> str:
        stages = f"{self.nstages} {'stage' if self.nstages == 1 else 'stages'}"
        if self.shards is not None:
            stages += f", some of {self.shards.size} shards" if self.has_groups else f" of {self.shard_count} shards"
        return (
            f"{stages} on {self.nworkers} workers, balance {self.analysis.balance:.3f}, "
            f"{self.name} with {self.micro_batches_text}, {self.step_ms:.0f} ms per step expected"
            + ("" if self.measured is None else f" ({self.analysis.step_ms:.0f} by the profile alone)")
            + ("" if self.tail is None else ", the loss on the whole batch")
            + (", activations recomputed in backward" if self.recompute else "")
            + ("" if self.shards is None else f", {self.shards.sharded_share:.0%} of parameter bytes divided")
            + (", plan from cache" if self.is_cached else "")
        )
