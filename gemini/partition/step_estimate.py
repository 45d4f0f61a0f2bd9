"""Step estimate: the time of a step on the stages of a partition, from a simulated schedule.

The stages become a placement: one forward and one backward block per stage (two gradient blocks where the schedule
splits them), with the time of one micro-batch, its activation memory and the bytes sent. Each worker's order is:

| schedule                     | order                                                                               |
|------------------------------|-------------------------------------------------------------------------------------|
| a library schedule           | the library's, for placements it supports: one stage per worker, looped, V-shaped   |
| `1f1b`, any other placement  | 1F1B's depth limit, any stages (see `mixed_one_f_one_b`)                            |
| `composed`                   | searched for this placement, within the memory that weights leave free              |

A schedule that does not support the placement is replaced by 1F1B; `note` reports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemini.errors import PartitionError, ScheduleError
from gemini.nearest_name import remedy
from gemini.partition.mixed_one_f_one_b import order_mixed_one_f_one_b
from gemini.partition.traffic import StageTransfer
from gemini.profiling.measured_device import MB
from gemini.schedule.asap_times import asap
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Block
from gemini.schedule.composer import Composer
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.library import LIBRARY
from gemini.schedule.library.schedule_entry import ScheduleEntry
from gemini.schedule.link_costs import Links
from gemini.schedule.placements import PLACEMENTS
from gemini.schedule.placements import placement as named_placement
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import Simulation, simulate

COMPOSED, DEFAULT = "composed", "1f1b"
ALIASES = {"interleaved": "interleaved_1f1b", "zero_bubble": "zb_h1", "zero-bubble": "zb_h1"}
_INSTANT = 1e-9  # ms: blocks of a schedule must take some time


@dataclass(frozen=True)
class StageWork:
    """One micro-batch of a stage: its worker, its times on that worker (ms), and the MB saved for backward."""

    worker: int
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    saved_mb: float
    has_backward: bool


@dataclass(frozen=True)
class StepEstimate:
    """The simulated step: `depth` and `stage_activations_mb` by stage, `idle` and `activations_mb` by worker."""

    schedule: str
    step_ms: float
    idle: tuple[float, ...]
    activations_mb: tuple[float, ...]  # at the peak
    depth: tuple[int, ...]  # micro-batches between forward and backward
    stage_activations_mb: tuple[float, ...]  # at the peak
    plan: SchedPlan
    note: str = ""


def schedule_names() -> list[str]:
    """Return the names of all schedules that can be estimated."""
    return [*LIBRARY, COMPOSED, *ALIASES]


def find_schedule(name: str) -> str:
    """Resolve a schedule name or alias; raises PartitionError listing the valid names."""
    found = ALIASES.get(name, name)
    if found != COMPOSED and found not in LIBRARY:
        raise PartitionError(f"unknown schedule {name!r}\n    → {remedy(str(name), schedule_names())}")
    return found


def estimate_step(
    stages: Sequence[StageWork],
    transfers: Sequence[StageTransfer],
    nworkers: int,
    *,
    schedule: str,
    nmicros: int,
    links: Links,
    ends: Sequence[int] = (),
    free_mb: Sequence[float] | None = None,
    time_limit: float = 10.0,
) -> StepEstimate:
    """Simulate `nmicros` micro-batches; `free_mb` is the memory of each worker available to activations.

    `ends` are the stages that produce model outputs, which the loss may read.
    """
    name, note = find_schedule(schedule), ""
    known = LIBRARY.get(name)
    laid_out = build_placement(
        stages, transfers, nworkers, nmicros, links, ends=ends, split=known is not None and known.split
    )
    if known is None:
        plan, note = _compose(laid_out, nmicros, links, free_mb, time_limit)
    else:
        orders = _library_orders(known, laid_out, [stage.worker for stage in stages], nmicros)
        if orders is None:
            note = f"{name} requires {_requirement_text(known)}, which this partition does not have: {DEFAULT} is shown"
            name = DEFAULT
            laid_out = build_placement(stages, transfers, nworkers, nmicros, links, ends=ends)
            orders = order_mixed_one_f_one_b(laid_out, nmicros)
        plan = plan_from_orders(laid_out, orders)
    ran = simulate(plan, links=links).require()
    depth, activations = _peak_activations(ran, len(stages))
    return StepEstimate(
        name, float(ran.makespan), ran.idle, tuple(float(mb) for mb in ran.peak_memory), depth, activations, plan, note
    )


# ── the placement ────────────────────────────────────────────────────────────────────────────────────────────────────
def build_placement(
    stages: Sequence[StageWork], transfers: Sequence[StageTransfer], nworkers: int, nmicros: int, links: Links,
    *, ends: Sequence[int] = (), split: bool = False,
) -> SchedPlan:  # fmt: skip
    """Build the blocks of one micro-batch on the workers."""
    workers_of: dict[Block, tuple[int, ...]] = {}

    def add(stage: int, btype: str, ms: float, mb: float) -> Block:
        block = Block(0, max(ms, _INSTANT), mb, btype, stage=stage)
        workers_of[block] = (stages[stage].worker,)
        return block

    forwards, backwards = [], {}
    for at, work in enumerate(stages):
        saved = work.saved_mb if work.has_backward else 0.0
        forwards.append(add(at, FORWARD, work.forward_ms, saved))
        if work.has_backward and split:
            backwards[at] = add(at, INPUT_GRADIENT, work.input_gradient_ms, -saved / 2)
            later = add(at, WEIGHT_GRADIENT, work.weight_gradient_ms, saved / 2 - saved)
            Block.make_dependency(backwards[at], later)
        elif work.has_backward:
            backwards[at] = add(at, BACKWARD, work.input_gradient_ms + work.weight_gradient_ms, -saved)
        if work.has_backward:
            Block.make_dependency(forwards[at], backwards[at])
    for transfer in transfers:
        Block.make_dependency(forwards[transfer.source], forwards[transfer.target], transfer.forward_mb * MB / nmicros)
        if not transfer.values:  # order only (random generator): it does not constrain backwards
            continue
        if (
            transfer.target in backwards and transfer.source in backwards
        ):  # a producer waits for its readers, gradients or not
            nbytes = transfer.backward_mb * MB / nmicros
            Block.make_dependency(backwards[transfer.target], backwards[transfer.source], nbytes)
    _order_backwards(forwards, backwards, transfers, ends)
    plan = SchedPlan(nworkers)
    plan.links = links.check(nworkers)
    for gid, (block, start) in enumerate(asap(workers_of, links).items()):
        block.gid = gid
        plan.add_block(block, workers_of[block], start)
    return plan


def _order_backwards(
    forwards: list[Block], backwards: dict[int, Block], transfers: Sequence[StageTransfer], ends: Sequence[int]
) -> None:
    """Start backwards after the whole forward: a stage that receives no gradient waits for the last stage.

    The loss runs with the last output that it reads; which outputs those are is unknown at this point. Its backward
    waits for all of them and returns a gradient to each, so backwards of output stages are ordered, last first.
    """
    receiving = {transfer.source for transfer in transfers if transfer.gradients}
    for stage, block in backwards.items():
        if stage not in receiving and forwards[-1] is not forwards[stage]:
            Block.make_dependency(forwards[-1], block)
    last_first = [backwards[stage] for stage in sorted(ends, reverse=True) if stage in backwards]
    for block in last_first[:1]:
        for stage in ends:
            Block.make_dependency(forwards[stage], block)
    for later, earlier in pairwise(last_first):
        Block.make_dependency(later, earlier)


# ── the order ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _library_orders(
    known: ScheduleEntry, laid_out: SchedPlan, workers: Sequence[int], nmicros: int
) -> list[list[Action]] | None:
    """Return each worker's actions; None where the schedule does not support the placement."""
    if known.any_placement:
        return [list(row) for row in known.orders(laid_out, nmicros)]
    count = len(set(workers))
    chunks, left = divmod(len(workers), count)
    shape = PLACEMENTS[known.placement]
    fits = not left and (chunks == 1 or shape.chunked) and known.chunks in (None, chunks)
    if fits and shape.admits(count) and known.admits(count, nmicros, chunks):
        own = named_placement(known.placement, count, split=known.split, chunks=chunks if shape.chunked else None)
        device_of = {block.stage or 0: own.device(block) for block in own}
        pairs = (
            {(device_of[stage][0], worker) for stage, worker in enumerate(workers)}
            if len(device_of) == len(workers)
            else ()
        )
        worker_of = dict(pairs)
        if len(pairs) == count:  # every device of the schedule maps to one worker of the partition
            rows: list[list[Action]] = [[] for _ in range(laid_out.ndevs)]
            present = {(block.stage, block.btype) for block in laid_out}
            for at, row in enumerate(known.orders(own, nmicros)):
                rows[worker_of[at]] = [action for action in row if (action.stage, action.btype) in present]
            return rows
    return order_mixed_one_f_one_b(laid_out, nmicros) if known.name == DEFAULT else None


def _requirement_text(known: ScheduleEntry) -> str:
    if known.placement == "vshape":
        return "one stage per worker"
    return f"{PLACEMENTS[known.placement].description} ({known.admissible})"


def _compose(
    laid_out: SchedPlan, nmicros: int, links: Links, free_mb: Sequence[float] | None, time_limit: float
) -> tuple[SchedPlan, str]:
    limits = None if free_mb is None else [max(0.0, mb) for mb in free_mb]
    try:
        return Composer.compose(laid_out, limits, nmicros=nmicros, links=links, time_limit=max(time_limit, 0.1)), ""
    except ScheduleError as error:
        if limits is None or all(math.isinf(mb) for mb in limits):
            raise
        plan = Composer.compose(laid_out, nmicros=nmicros, links=links, time_limit=max(time_limit, 0.1))
        return plan, f"no schedule fits the memory limits, shown without them: {str(error).splitlines()[0]}"


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _peak_activations(ran: Simulation, nstages: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the peak micro-batches between forward and backward and the peak activations (MB) of each stage."""
    ends: dict[int, str] = {}  # the block type of a stage that frees the last activations
    for block in ran.times:
        if block.btype != FORWARD and ends.get(block.stage or 0) != WEIGHT_GRADIENT:
            ends[block.stage or 0] = block.btype
    count, depth = [0] * nstages, [0] * nstages
    live, peak = [0.0] * nstages, [0.0] * nstages
    for block in sorted(ran.times, key=lambda block: ran.times[block]):
        stage = block.stage or 0
        live[stage] += block.memory
        peak[stage] = max(peak[stage], live[stage])
        if block.btype == FORWARD and stage in ends:
            count[stage] += 1
            depth[stage] = max(depth[stage], count[stage])
        elif block.btype == ends.get(stage):
            count[stage] -= 1
    return tuple(depth), tuple(peak)
