"""The plan of a step: stages, who runs them, and in which order all micro-batches go through them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.batch_analysis.graph_analysis import GraphKinds
    from gemini.capture.attribute_writes import AttributeWrite
    from gemini.capture.batch_dim import BatchLayout
    from gemini.ir.graph import Graph
    from gemini.partition.analysis.analysis_result import Analysis
    from gemini.partition.assignment import Partition
    from gemini.pipe.piped_model import Piped
    from gemini.planner.tail_plan import TailNodes
    from gemini.profiling.profile_result import Profile
    from gemini.random_numbers.random_branches import RandomBranches
    from gemini.random_numbers.rng_recorder import RandomOpPattern
    from gemini.schedule.schedplan import SchedPlan


class UnplannableError(Exception):
    """A model cannot run by a plan; the text says why, for its user."""


class CoupledSamplesError(UnplannableError):
    """Samples meet in a part of a model, which may be its end."""


@dataclass(frozen=True)
class MeasuredSteps:
    """What is expected of a plan by some of its steps: what they were planned as, with the times that they had."""

    schedule: SchedPlan
    step_ms: float
    steps: int


@dataclass(frozen=True)
class StepPlan:
    """All that is fixed for calls of one kind.

    `batch` says which dimension of each tensor of the call counts samples, `forms` which values of the graph do;
    `draws` are the random numbers of each stage.
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
    rng_patterns: tuple[tuple[RandomOpPattern, ...], ...]  # empty: each worker draws its own
    branches: RandomBranches | None = None  # on random numbers: the plan is for one way
    buffers_written_once: tuple[
        tuple[int, ...], ...
    ] = ()  # of each stage: buffers that it writes once a step, by place among its own
    single_micro_batch_reason: str = ""  # why the batch is one micro-batch, all of it
    tail: TailNodes | None = None  # of the graph, what sees the whole batch, as the loss then does
    captured_parts: float = 1.0  # of what was captured and profiled, in a batch
    recompute: bool = False  # stages compute their activations again in backward, for want of memory
    is_cached: bool = False  # an earlier run has made it
    measured: MeasuredSteps | None = None  # once steps have run by it
    _built: dict[frozenset[int], Piped] = field(default_factory=dict, repr=False)

    @property
    def nstages(self) -> int:
        """How many stages micro-batches go through."""
        return self.partition.nstages - (self.tail is not None and bool(self.tail.nodes))

    @property
    def step_ms(self) -> float:
        """How long a step is expected to take: by those that have run, else by the profile."""
        return self.analysis.step_ms if self.measured is None else self.measured.step_ms

    @property
    def expected(self) -> SchedPlan:
        """The schedule with the times that actions are expected to take."""
        return self.schedule if self.measured is None else self.measured.schedule

    def can_split(self, samples: int, micro_batches: int) -> bool:
        """Whether it is for so many samples in as many micro-batches as may be."""
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
        """Whether a step draws random numbers of torch."""
        from gemini.batch_analysis.precompute import uses_host_rng

        return any(node.random and not uses_host_rng(self.graph, node) for node in self.graph.nodes)

    @cached_property
    def attribute_writes(self) -> tuple[AttributeWrite, ...]:
        """The attributes that a call sets: their values are in the result of the graph."""
        from gemini.capture.attribute_writes import returned_writes

        return returned_writes(self.graph)

    @cached_property
    def returned_sources(self) -> dict[int, int]:
        """The sources of the graph that are in its result as they are, by place among its outputs."""
        found = enumerate(self.graph.outputs())
        return {at: ref.node for at, ref in found if self.graph.nodes[ref.node].is_source}

    @cached_property
    def uses_host_rng(self) -> bool:
        """Whether it draws from Python's or NumPy's generator."""
        from gemini.batch_analysis.precompute import uses_host_rng

        return any(uses_host_rng(self.graph, node) for node in self.graph.nodes)

    def build(self, shares: Iterable[int] = ()) -> Piped:
        """The stages, with factors at these nodes, numbered in ascending order: their shares in a micro-batch."""
        wanted = frozenset(shares)
        if wanted not in self._built:
            from gemini.pipe.piped_model import build_piped

            numbered = {node: at for at, node in enumerate(sorted(wanted))}
            self._built[wanted] = build_piped(self.graph, self.profile, self.partition, numbered)
        return self._built[wanted]

    @property
    def micro_batches_text(self) -> str:
        """Into how many a batch is split, in words."""
        return "1 micro-batch" if self.micro_batches == 1 else f"{self.micro_batches} micro-batches"

    def __str__(self) -> str:
        return (
            f"{self.nstages} stages on {self.schedule.ndevs} workers, balance {self.analysis.balance:.3f}, "
            f"{self.name} with {self.micro_batches_text}, {self.step_ms:.0f} ms a step expected"
            + ("" if self.measured is None else f" ({self.analysis.step_ms:.0f} by the profile alone)")
            + ("" if self.tail is None else ", the loss on the whole batch")
            + (", activations computed again in backward" if self.recompute else "")
            + (", plan from cache" if self.is_cached else "")
        )
