"""Tails in plans: steps that run by micro-batches up to a loss, or an end of the model, that sees the whole batch.

    worker 0    F0 F1 F2 F3 ·         · · I3 I2 I1 I0 W …
    worker 1     · F0 F1 F2 F3 [tail] I3 I2 I1 I0 W …

All orders are brought to this form: forwards first, as they come in the schedule, then everything else. Memory is that
of GPipe. Where the tail is most of the work, nothing is won: the batch is then better left whole.
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

_MOST = 0.5  # of the work: a larger tail is not worth its micro-batches
_WORTH = 0.25  # of the parameters, at least, are in layers before the first that couples samples
_INSTANT = 1e-6  # ms: what a node of the tail is taken to cost where stages are laid out
_UNSLICED = RandomOpPattern("", (), (), None)  # drawn once, for all samples


@dataclass(frozen=True)
class TailNodes:
    """The nodes of a tail; none where only the loss sees the whole batch."""

    nodes: tuple[int, ...]
    reason: str = field(default="", compare=False)  # why there is one

    def split_costs(self, profile: Profile) -> tuple[Profile, float]:
        """The profile without the tail, and what that takes (ms); raises UnplannableError where it is most of all."""
        inside = set(self.nodes)
        spent = sum(cost.ms for cost in profile.nodes if cost.id in inside)
        if spent > _MOST * sum(cost.ms for cost in profile.nodes):
            raise UnplannableError("samples meet so early that most of the work would be on the whole batch")
        nodes = tuple(
            replace(cost, forward_ms=_INSTANT, backward_ms=_INSTANT if cost.backward_ms else 0.0)
            if cost.id in inside
            else cost
            for cost in profile.nodes
        )
        return replace(profile, nodes=nodes), spent

    def filter_layouts(self, *layouts: Iterator[Partition]) -> Iterator[Partition]:
        """The partitions of which every stage is more than a part of the tail, of the first layouts that have any."""
        inside, has_any = set(self.nodes), False
        for each in layouts:
            for partition in each if not has_any else ():
                if all(not inside.issuperset(nodes) for nodes in partition.stages):
                    has_any = True
                    yield partition

    def separate_stage(self, partition: Partition) -> Partition:
        """The same stages, with the tail as another one, where the last is."""
        if not self.nodes:
            return partition
        inside = set(self.nodes)
        stages = tuple(tuple(node for node in nodes if node not in inside) for nodes in partition.stages)
        workers = (*partition.workers, partition.workers[-1])
        return replace(partition, stages=(*stages, self.nodes), workers=workers)

    def unslice_patterns(
        self, drawn: tuple[tuple[RandomOpPattern, ...], ...]
    ) -> tuple[tuple[RandomOpPattern, ...], ...]:
        """The draws of all stages: those of the tail are not cut."""
        return (*drawn[:-1], (_UNSLICED,) if drawn[-1] else ()) if self.nodes else drawn


def exclude_tail(forms: GraphKinds) -> GraphKinds:
    """What is proven of all that is not in the tail; raises UnplannableError."""
    try:
        return release_blockers(forms)
    except NoTail as error:
        raise UnplannableError(str(error)) from error


def couples_late(model: nn.Module) -> bool:
    """Whether statistics over the batch may be taken at the end only: else it is not worth a capture to look."""
    before = total = 0
    met = False
    for module in model.modules():
        met = met or uses_batch_statistics(module)
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total, before = total + own, before + (0 if met else own)
    return before >= _WORTH * total


def find_tail_nodes(forms: GraphKinds, reason: str) -> TailNodes:
    """The tail of a graph; raises UnplannableError."""
    if forms.own_statistics:
        raise UnplannableError("statistics of micro-batches, and a loss that compares samples")
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
    """The tail as workers run it: how every value is put together, by port."""
    if plan.tail is None:
        return None
    stage = len(piped.stages) - 1 if plan.tail.nodes else None
    interpreter = join_weighted(plan.forms, border(plan.graph, plan.tail.nodes))
    joins: dict[str, JoinKind] = {}
    for name, port in piped.routes.ports.items():
        if port.source in (None, stage):
            continue
        found: JoinKind | None = None
        if not isinstance(port.value, Ref):
            found = join_kind_of_number(port.value, interpreter)
        elif port.value in interpreter.values:
            kind = interpreter.values[port.value].kind
            if isinstance(
                kind, (Shard, Replicate, Partial, WeightedPartial)
            ):  # a mean is made a sum where the loss reads it
                found = Partial() if isinstance(kind, WeightedPartial) else kind
        if found is not None:
            joins[name] = found
        elif stage in port.targets:
            raise UnplannableError(f"{name} of the whole batch is not had from micro-batches")
    return Tail(stage, joins)


def check_stage_backward(plan: StepPlan, piped: Piped) -> None:
    """Raise UnplannableError where what is trained has no backward, which only the tail's nodes had in its stage."""
    going_back = {block.stage for block in plan.schedule if block.btype != FORWARD}
    for at, stage in enumerate(piped.stages[: plan.nstages]):
        if going_back and at not in going_back and any(one.requires_grad for one in stage.parameters()):
            raise UnplannableError("a stage of micro-batches has no gradient of its own")


def put_forwards_first(plan: SchedPlan, tail_ms: Number) -> SchedPlan:
    """The same blocks on the same devices: all forwards, the tail, then the rest, each as early as its order allows.

    Raises InvalidPlanError where that takes more memory than the plan was made for.
    """
    starts: dict[Block, Number] = {}
    free: list[Number] = [0] * plan.ndevs

    def put(blocks: list[Block], earliest: Number) -> None:
        for block in blocks:  # in the order of time: what a block needs is there
            arrivals = [starts[prev] + prev.span + plan.delay(prev, block) for prev in block.before]
            starts[block] = max(earliest, *arrivals, *(free[device] for device in plan.device(block)))
            for device in plan.device(block):
                free[device] = starts[block] + block.span

    blocks = plan.all_blocks()
    put([block for block in blocks if block.btype == FORWARD], 0)
    put([block for block in blocks if block.btype != FORWARD], max(free) + tail_ms)
    made = plan.retimed(starts)
    made.pattern, made.proof = None, None
    return made.validate()
