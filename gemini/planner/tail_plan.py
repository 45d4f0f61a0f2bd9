"""Tail plan: a step in micro-batches up to a loss, or an end of the model, on the whole batch.

    worker 0    F0 F1 F2 F3 ·         · · I3 I2 I1 I0 W …
    worker 1     · F0 F1 F2 F3 [tail] I3 I2 I1 I0 W …

Every schedule is transformed into this form: forwards first, in schedule order, then everything else. Memory is that
of GPipe. Where the tail is most of the work, a single micro-batch is as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from gemini.batch_analysis.batch_kinds import Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.batchnorm import uses_batch_statistics
from gemini.batch_analysis.microbatch_join import JoinKind, Tail
from gemini.batch_analysis.precompute import random_guards
from gemini.batch_analysis.whole_batch_tail import (
    NoTail,
    border,
    find_tail,
    join_kind_of_number,
    join_weighted,
    release_blockers,
)
from gemini.ir.pytree import Ref
from gemini.partition.assignment import Partition
from gemini.planner.step_plan import UnplannableError
from gemini.profiling.profile_result import Profile
from gemini.random_numbers.rng_recorder import RandomOpPattern
from gemini.schedule.block import FORWARD, Block, Number
from gemini.schedule.schedplan import SchedPlan

if TYPE_CHECKING:
    from gemini.batch_analysis.graph_analysis import GraphKinds
    from gemini.pipe.piped_model import Piped
    from gemini.planner.step_plan import StepPlan

_MAX_TAIL = 0.5  # of the work: micro-batches do not pay off with a larger tail
_MIN_BEFORE = 0.25  # of the parameters must precede the first layer that couples samples
_INSTANT = 1e-6  # ms: cost of a tail node for the layout of stages
_UNSLICED = RandomOpPattern("", (), (), None)  # generated once, for all samples


@dataclass(frozen=True)
class TailNodes:
    """The nodes of a tail; none if only the loss runs on the whole batch."""

    nodes: tuple[int, ...]
    reason: str = field(default="", compare=False)  # why there is a tail

    def split_costs(self, profile: Profile) -> tuple[Profile, float]:
        """Return the profile without the tail, and its time (ms); raises UnplannableError if it dominates."""
        inside = set(self.nodes)
        spent = sum(cost.ms for cost in profile.nodes if cost.id in inside)
        if spent > _MAX_TAIL * sum(cost.ms for cost in profile.nodes):
            raise UnplannableError("samples are coupled so early that most of the work would be on the whole batch")
        nodes = tuple(
            replace(cost, forward_ms=_INSTANT, backward_ms=_INSTANT if cost.backward_ms else 0.0)
            if cost.id in inside
            else cost
            for cost in profile.nodes
        )
        return replace(profile, nodes=nodes), spent

    def filter_layouts(self, *layouts: Iterator[Partition]) -> Iterator[Partition]:
        """Yield partitions in which no stage lies inside the tail, of the first iterator that has any."""
        inside, has_any = set(self.nodes), False
        for each in layouts:
            for partition in each if not has_any else ():
                if all(not inside.issuperset(nodes) for nodes in partition.stages):
                    has_any = True
                    yield partition

    def separate_stage(self, partition: Partition) -> Partition:
        """Return the partition with the tail as a further stage on the last worker."""
        if not self.nodes:
            return partition
        inside = set(self.nodes)
        stages = tuple(tuple(node for node in nodes if node not in inside) for nodes in partition.stages)
        workers = (*partition.workers, partition.workers[-1])
        return replace(partition, stages=(*stages, self.nodes), workers=workers)

    def unslice_patterns(
        self, patterns: tuple[tuple[RandomOpPattern, ...], ...]
    ) -> tuple[tuple[RandomOpPattern, ...], ...]:
        """Return the patterns of all stages, with those of the tail unsliced."""
        return (*patterns[:-1], (_UNSLICED,) if patterns[-1] else ()) if self.nodes else patterns


def exclude_tail(forms: GraphKinds) -> GraphKinds:
    """Return the proof for all nodes outside the tail; raises UnplannableError."""
    try:
        return release_blockers(forms)
    except NoTail as error:
        raise UnplannableError(str(error)) from error


def couples_late(model: nn.Module) -> bool:
    """Return whether statistics over the batch may occur at the end only; otherwise a capture is not worthwhile."""
    before = total = 0
    coupled = False
    for module in model.modules():
        coupled = coupled or uses_batch_statistics(module)
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total, before = total + own, before + (0 if coupled else own)
    return before >= _MIN_BEFORE * total


def find_tail_nodes(forms: GraphKinds, reason: str) -> TailNodes:
    """Return the tail of a graph; raises UnplannableError."""
    if forms.own_statistics:
        raise UnplannableError("statistics per micro-batch, and a loss that compares samples")
    if forms.graph.rolled:
        raise UnplannableError("a loop over samples, and a loss that compares them")
    if random_guards(forms.graph):
        raise UnplannableError("a branch depends on random numbers, and a loss compares samples")
    try:
        nodes = find_tail(forms)
        join_weighted(forms, border(forms.graph, nodes))
    except NoTail as error:
        raise UnplannableError(str(error)) from error
    return TailNodes(nodes, reason)


def build_tail(plan: StepPlan, piped: Piped) -> Tail | None:
    """Return the tail for the workers: per port, how its value is joined from micro-batches."""
    if plan.tail is None:
        return None
    stage = len(piped.stages) - 1 if plan.tail.nodes else None
    interpreter = join_weighted(plan.forms, border(plan.graph, plan.tail.nodes))
    joins: dict[str, JoinKind] = {}
    for name, port in piped.routes.ports.items():
        if port.source in (None, stage):
            continue
        found: JoinKind | None = None
        value = port.value if plan.local is None else plan.local.original(port.value)
        if not isinstance(value, Ref):
            found = join_kind_of_number(value, interpreter)
        elif value in interpreter.values:
            kind = interpreter.values[value].kind
            if isinstance(kind, (Shard, Replicate, Partial, WeightedPartial)):
                # A mean becomes a sum where the loss reads it.
                found = Partial() if isinstance(kind, WeightedPartial) else kind
        if found is not None:
            joins[name] = found
        elif stage in port.targets:
            raise UnplannableError(f"{name} of the whole batch cannot be joined from micro-batches")
    return Tail(stage, joins)


def check_stage_backward(plan: StepPlan, piped: Piped) -> None:
    """Raise UnplannableError where a stage with trained parameters has no backward: only its tail nodes had one."""
    with_backward = {block.stage for block in plan.schedule if block.btype != FORWARD}
    for at, stage in enumerate(piped.stages[: plan.nstages]):
        if with_backward and at not in with_backward and any(one.requires_grad for one in stage.parameters()):
            raise UnplannableError("a stage of micro-batches has no gradient of its own")


def put_forwards_first(plan: SchedPlan, tail_ms: Number) -> SchedPlan:
    """Return the same blocks on the same devices: all forwards, the tail, then the rest, each as early as possible.

    Raises InvalidPlanError where that exceeds the memory of the plan.
    """
    starts: dict[Block, Number] = {}
    free: list[Number] = [0] * plan.ndevs

    def place(blocks: list[Block], earliest: Number) -> None:
        for block in blocks:  # in time order: predecessors are placed
            arrivals = [starts[prev] + prev.span + plan.delay(prev, block) for prev in block.before]
            starts[block] = max(earliest, *arrivals, *(free[device] for device in plan.device(block)))
            for device in plan.device(block):
                free[device] = starts[block] + block.span

    blocks = plan.all_blocks()
    place([block for block in blocks if block.btype == FORWARD], 0)
    place([block for block in blocks if block.btype != FORWARD], max(free) + tail_ms)
    made = plan.retimed(starts)
    made.pattern, made.proof = None, None
    return made.validate()
