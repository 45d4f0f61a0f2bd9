"""Prediction: how long a step takes on these stages, from a schedule run by the simulator.

Stages become a placement: a forward and a backward for each (two gradients where the schedule splits them), with the
time of one micro-batch, the memory it holds, and the bytes that travel. The schedule gives the order of each worker:

| schedule                     | order                                                                               |
|------------------------------|-------------------------------------------------------------------------------------|
| a name of the library        | the library's, if stages lie as it needs them: one a worker, looped, or V-shaped    |
| `1f1b`, stages lie otherwise | 1F1B's depth, any stages (see `mixed_orders`)                                       |
| `composed`                   | searched for this very placement, within the memory that weights leave              |

A schedule that these stages do not admit is replaced by 1F1B, and `note` says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemini.errors import PartitionError, ScheduleError
from gemini.nearest_name import remedy
from gemini.partition.mixed_one_f_one_b import mixed_orders
from gemini.partition.traffic import Flow
from gemini.profiling.measured_device import MB
from gemini.schedule.asap_times import asap
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Block
from gemini.schedule.composer import Composer
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.library import LIBRARY
from gemini.schedule.library.schedule_entry import Known
from gemini.schedule.link_costs import Links
from gemini.schedule.placements import PLACEMENTS
from gemini.schedule.placements import placement as named_placement
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import Simulation, simulate

COMPOSED, DEFAULT = "composed", "1f1b"
ALIASES = {"interleaved": "interleaved_1f1b", "zero_bubble": "zb_h1", "zero-bubble": "zb_h1"}
_INSTANT = 1e-9  # ms: blocks of a schedule must take some time


@dataclass(frozen=True)
class Work:
    """A stage for one micro-batch: its worker, its times there (ms), and what it keeps for backward (MB)."""

    worker: int
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    kept_mb: float
    learns: bool


@dataclass(frozen=True)
class Prediction:
    """How a step runs: `depth` and `kept_mb` by stage, `idle` and `held_mb` by worker."""

    schedule: str
    step_ms: float
    idle: tuple[float, ...]
    held_mb: tuple[float, ...]  # activations at their peak
    depth: tuple[int, ...]  # micro-batches between forward and backward
    kept_mb: tuple[float, ...]
    plan: SchedPlan
    note: str = ""


def schedule_names() -> list[str]:
    """All that a prediction can be made for."""
    return [*LIBRARY, COMPOSED, *ALIASES]


def find_schedule(name: str) -> str:
    """The schedule of a name, which may be an alias; raises PartitionError listing those that exist."""
    found = ALIASES.get(name, name)
    if found != COMPOSED and found not in LIBRARY:
        raise PartitionError(f"no schedule is called {name!r}\n    → {remedy(str(name), schedule_names())}")
    return found


def predict(
    stages: Sequence[Work],
    flows: Sequence[Flow],
    nworkers: int,
    *,
    schedule: str,
    nmicros: int,
    links: Links,
    ends: Sequence[int] = (),
    free_mb: Sequence[float] | None = None,
    time_limit: float = 10.0,
) -> Prediction:
    """Run `nmicros` micro-batches; `free_mb` is the memory of each worker that activations may take.

    `ends` are the stages that make outputs of the model, which the loss may read.
    """
    name, note = find_schedule(schedule), ""
    known = LIBRARY.get(name)
    laid_out = place(stages, flows, nworkers, nmicros, links, ends=ends, split=known is not None and known.split)
    if known is None:
        plan, note = _composed(laid_out, nmicros, links, free_mb, time_limit)
    else:
        orders = _orders(known, laid_out, [stage.worker for stage in stages], nmicros)
        if orders is None:
            note = f"{name} needs {_needs(known)}, which this partition is not: shown for {DEFAULT}"
            name = DEFAULT
            laid_out = place(stages, flows, nworkers, nmicros, links, ends=ends)
            orders = mixed_orders(laid_out, nmicros)
        plan = plan_from_orders(laid_out, orders)
    ran = simulate(plan, links=links).require()
    depth, kept = _held(ran, len(stages))
    return Prediction(
        name, float(ran.makespan), ran.idle, tuple(float(mb) for mb in ran.peak_memory), depth, kept, plan, note
    )


# ── the placement ──────────────────────────────────────────────────────────────────────────────────────────────────
def place(
    stages: Sequence[Work], flows: Sequence[Flow], nworkers: int, nmicros: int, links: Links,
    *, ends: Sequence[int] = (), split: bool = False,
) -> SchedPlan:  # fmt: skip
    """The blocks of one micro-batch on the workers."""
    homes: dict[Block, tuple[int, ...]] = {}

    def add(stage: int, btype: str, ms: float, mb: float) -> Block:
        block = Block(0, max(ms, _INSTANT), mb, btype, stage=stage)
        homes[block] = (stages[stage].worker,)
        return block

    forwards, backwards = [], {}
    for at, work in enumerate(stages):
        kept = work.kept_mb if work.learns else 0.0
        forwards.append(add(at, FORWARD, work.forward_ms, kept))
        if work.learns and split:
            backwards[at] = add(at, INPUT_GRADIENT, work.input_gradient_ms, -kept / 2)
            later = add(at, WEIGHT_GRADIENT, work.weight_gradient_ms, kept / 2 - kept)
            Block.make_dependency(backwards[at], later)
        elif work.learns:
            backwards[at] = add(at, BACKWARD, work.input_gradient_ms + work.weight_gradient_ms, -kept)
        if work.learns:
            Block.make_dependency(forwards[at], backwards[at])
    for flow in flows:
        Block.make_dependency(forwards[flow.source], forwards[flow.target], flow.forward_mb * MB / nmicros)
        if not flow.values:  # it only follows, as one that draws random numbers follows another: backwards need not
            continue
        if flow.target in backwards and flow.source in backwards:  # a maker waits for its readers, gradients or not
            nbytes = flow.backward_mb * MB / nmicros
            Block.make_dependency(backwards[flow.target], backwards[flow.source], nbytes)
    _end_before_gradients(forwards, backwards, flows, ends)
    plan = SchedPlan(nworkers)
    plan.links = links.check(nworkers)
    for gid, (block, start) in enumerate(asap(homes, links).items()):
        block.gid = gid
        plan.add_block(block, homes[block], start)
    return plan


def _end_before_gradients(
    forwards: list[Block], backwards: dict[int, Block], flows: Sequence[Flow], ends: Sequence[int]
) -> None:
    """A backward begins when the whole forward is over: where no gradient arrives, it waits for the last stage.

    The loss is where the last of the outputs is that it reads; which these are is not known yet. Its backward waits for
    all of them and gives each its gradient, so backwards of outputs follow each other, last first.
    """
    fed = {flow.source for flow in flows if flow.gradients}
    for stage, block in backwards.items():
        if stage not in fed and forwards[-1] is not forwards[stage]:
            Block.make_dependency(forwards[-1], block)
    last_first = [backwards[stage] for stage in sorted(ends, reverse=True) if stage in backwards]
    for block in last_first[:1]:
        for stage in ends:
            Block.make_dependency(forwards[stage], block)
    for later, earlier in pairwise(last_first):
        Block.make_dependency(later, earlier)


# ── the order ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _orders(known: Known, laid_out: SchedPlan, workers: Sequence[int], nmicros: int) -> list[list[Action]] | None:
    """What each worker does; None where stages do not lie as the schedule needs them."""
    if known.any_placement:
        return [list(row) for row in known.orders(laid_out, nmicros)]
    count = len(set(workers))
    chunks, left = divmod(len(workers), count)
    shape = PLACEMENTS[known.placement]
    fits = not left and (chunks == 1 or shape.chunked) and known.chunks in (None, chunks)
    if fits and shape.admits(count) and known.admits(count, nmicros, chunks):
        own = named_placement(known.placement, count, split=known.split, chunks=chunks if shape.chunked else None)
        home = {block.stage or 0: own.device(block) for block in own}
        pairs = {(home[stage][0], worker) for stage, worker in enumerate(workers)} if len(home) == len(workers) else ()
        name = dict(pairs)
        if len(pairs) == count:  # each worker of the schedule is one of ours, for all its stages
            rows: list[list[Action]] = [[] for _ in range(laid_out.ndevs)]
            there = {(block.stage, block.btype) for block in laid_out}
            for at, row in enumerate(known.orders(own, nmicros)):
                rows[name[at]] = [action for action in row if (action.stage, action.btype) in there]
            return rows
    return mixed_orders(laid_out, nmicros) if known.name == DEFAULT else None


def _needs(known: Known) -> str:
    if known.placement == "vshape":
        return "one stage a worker"
    return f"{PLACEMENTS[known.placement].description} ({known.admissible})"


def _composed(
    laid_out: SchedPlan, nmicros: int, links: Links, free_mb: Sequence[float] | None, time_limit: float
) -> tuple[SchedPlan, str]:
    limits = None if free_mb is None else [max(0.0, mb) for mb in free_mb]
    try:
        return Composer.compose(laid_out, limits, nmicros=nmicros, links=links, time_limit=max(time_limit, 0.1)), ""
    except ScheduleError as error:
        if limits is None or all(math.isinf(mb) for mb in limits):
            raise
        plan = Composer.compose(laid_out, nmicros=nmicros, links=links, time_limit=max(time_limit, 0.1))
        return plan, f"no schedule fits the memory, shown without limit: {str(error).splitlines()[0]}"


# ── what is held ───────────────────────────────────────────────────────────────────────────────────────────────────
def _held(ran: Simulation, nstages: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """For every stage, the most micro-batches between forward and backward, and the most it keeps (MB)."""
    ends: dict[int, str] = {}  # the block of a stage that gives back the last of what is kept
    for block in ran.times:
        if block.btype != FORWARD and ends.get(block.stage or 0) != WEIGHT_GRADIENT:
            ends[block.stage or 0] = block.btype
    count, depth = [0] * nstages, [0] * nstages
    held, kept = [0.0] * nstages, [0.0] * nstages
    for block in sorted(ran.times, key=lambda block: ran.times[block]):
        stage = block.stage or 0
        held[stage] += block.memory
        kept[stage] = max(kept[stage], held[stage])
        if block.btype == FORWARD and stage in ends:
            count[stage] += 1
            depth[stage] = max(depth[stage], count[stage])
        elif block.btype == ends.get(stage):
            count[stage] -= 1
    return tuple(depth), tuple(kept)
