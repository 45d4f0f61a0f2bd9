"""The composer: from blocks on devices to a schedule of all micro-batches, with a proof of its quality.

placement ─► Problem (numbers) ─► bounds
                │
                ├─ least-memory order of one micro-batch: is there any schedule at all?
                ├─ steady state: beam search and CP-SAT, periods from the bound upwards
                └─ ramps: warm-up and cool-down for N micro-batches ─► SchedPlan
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gemini.errors import InfeasibleError, ScheduleError
from gemini.schedule.block import Number
from gemini.schedule.link_costs import Links
from gemini.schedule.phases import find_phases
from gemini.schedule.placement_problem import PlacementProblem, fits, make_problem, memory_limits, number_blocks
from gemini.schedule.schedplan import Proof, SchedPlan
from gemini.schedule.search.kernel import Kernel, normalise
from gemini.schedule.search.latency import latency_kernel
from gemini.schedule.search.min_memory import slimmest
from gemini.schedule.search.sequential import Sequence as Order
from gemini.schedule.search.sequential import find_order, sequential_kernel
from gemini.schedule.search.steady_state import Steady, SteadySearch
from gemini.schedule.search.warmup_cooldown import Ramps
from gemini.schedule.unroll import pattern_of, unroll

_MORE_TO_SHOW = (2, 4)
_MOST_BLOCKS_TO_SHOW = 5_000
OBJECTIVES = ("period", "makespan", "memory", "latency")
Memory = Number | Sequence[Number] | None


class Composer:
    """Searches schedules. All methods are static: a composer has no state."""

    @staticmethod
    def compose(
        placement: SchedPlan,
        memory: Memory = None,
        *,
        nmicros: int | None = None,
        links: Links | None = None,
        time_limit: float = 10.0,
        max_kernel: int = 16,
        objective: str | Sequence[str] = ("period", "makespan", "memory"),
        seed: int = 0,
    ) -> SchedPlan:
        """The best schedule found for the blocks of one micro-batch.

        `memory` is one limit for all devices, one per device, or None. If no block releases memory (inference), a
        block holds memory only while it runs. `nmicros` is the number of micro-batches of the returned plan (default:
        enough to show warm-up, steady state and cool-down). `max_kernel` limits how many micro-batches the steady state
        may interleave. `objective` lists the quantities to minimise, most important first:

        - `("period", "makespan", "memory")`: time per micro-batch, then the ramps, then memory;
        - `("period", "memory")`: the least memory at the shortest period, stored as the plan's limits;
        - `"latency"`: the shortest path of each micro-batch through the devices, then the period.

        `time_limit` in seconds bounds the search for a better steady state; a valid plan is always returned. The same
        seed yields the same plan unless the search reaches the limit.
        """
        began = time.perf_counter()
        goals = _goals(objective)
        _check_options(nmicros, time_limit, max_kernel)
        placement = number_blocks(placement)
        limits = memory_limits(memory, placement.ndevs)
        links = links if links is not None else placement.links
        problem = make_problem(placement, limits, links)
        order = _feasible_order(problem, placement)
        search = SteadySearch(
            problem,
            sequential_kernel(problem, order.order),
            max_kernel=max_kernel,
            seed=seed,
            deadline=began + time_limit,
        )
        plan = SchedPlan(placement.ndevs)
        plan.links, plan.memory, plan.placement = links, limits, placement
        if goals[0] == "latency":
            steady = latency_kernel(problem, order.order, search.best.bound)
            plan.pattern = pattern_of(problem, steady.kernel, rigid=True)
        else:
            steady = search.run()
            if goals[:2] == ("period", "memory"):
                kernel, caps = slimmest(search)
                plan.memory = tuple(_plain(cap) for cap in caps)
            else:
                kernel = _shortest_ramps(search)
            plan.pattern = pattern_of(problem, kernel)
        plan.proof = _proof(problem, steady, time.perf_counter() - began)
        schedule = unroll(plan, nmicros) if nmicros else _shown(plan, _enough_to_show(problem, steady.kernel))
        if schedule.proof is not None:
            schedule.proof = replace(schedule.proof, seconds=time.perf_counter() - began)
        return schedule

    @staticmethod
    def compose_n(placement: SchedPlan, memory: Memory, nmicros: int, **options: object) -> SchedPlan:
        """`compose` for `nmicros` micro-batches; takes the same options."""
        return Composer.compose(placement, memory, nmicros=nmicros, **options)  # type: ignore[arg-type]


def _goals(objective: str | Sequence[str]) -> tuple[str, ...]:
    goals = (objective,) if isinstance(objective, str) else tuple(objective)
    unknown = [goal for goal in goals if goal not in OBJECTIVES]
    if unknown or not goals:
        raise ScheduleError(f"objective {objective!r}\n    → choose from {', '.join(OBJECTIVES)}, most important first")
    return goals


def _check_options(nmicros: int | None, time_limit: float, max_kernel: int) -> None:
    if nmicros is not None and (isinstance(nmicros, bool) or not isinstance(nmicros, int) or nmicros < 1):
        raise ScheduleError(
            f"a schedule for {nmicros!r} micro-batches\n    → give a number of micro-batches, 1 or more"
        )
    if not time_limit > 0:
        raise ScheduleError(f"time limit {time_limit!r}\n    → give seconds above zero")
    if isinstance(max_kernel, bool) or not isinstance(max_kernel, int) or max_kernel < 1:
        raise ScheduleError(f"a kernel of at most {max_kernel!r} micro-batches\n    → give 1 or more")


def _feasible_order(problem: PlacementProblem, placement: SchedPlan) -> Order:
    """Return an order in which one micro-batch fits the memory; if there is none, raise with the memory required."""
    order = find_order(problem)
    short = [dev for dev in range(problem.ndevs) if not fits(order.peaks[dev], problem.caps[dev])]
    if short:
        blocks = sorted(placement, key=lambda block: block.gid or 0)
        lines = []
        for dev in short:
            takers = [blocks[index] for index in problem.on_device[dev] if problem.memory[index] > 0]
            large = [block for block in takers if not fits(block.memory, problem.caps[dev])]
            if large:
                what = ", ".join(f"block {block} takes {block.memory:g}" for block in large[:12])
                lines.append(f"{what} on device {dev}, which has {problem.caps[dev]:g}")
            else:
                lines.append(
                    f"device {dev} has memory {problem.caps[dev]:g}, but even one micro-batch at a time needs "
                    f"{order.peaks[dev]:g} there (taken by {', '.join(map(str, takers[:12]))})"
                )
        word = "the least that works is" if order.proven else "this much works:"
        least = ", ".join(f"{order.peaks[dev]:g} on device {dev}" for dev in short)
        raise InfeasibleError("\n".join(lines) + f"\n    → give more memory; {word} {least}")
    return order


def _shortest_ramps(search: SteadySearch) -> Kernel:
    """Of the kernels with the best period, the one whose schedule of a few micro-batches is shortest."""
    problem, best = search.problem, search.best.kernel
    count = _enough_to_show(problem, best)

    def measured(kernel: Kernel) -> tuple[int, Kernel]:
        kernel = normalise(problem.times(kernel.copies), kernel)
        return Ramps(problem, kernel).follow(count).makespan, kernel

    options = [measured(best), *(measured(other) for other in search.alternatives())]
    return min(options, key=lambda option: option[0])[1]


def _shown(plan: SchedPlan, count: int) -> SchedPlan:
    """The plan for `nmicros` micro-batches, or for as many as are needed to reach a steady state."""
    schedule = unroll(plan, count)
    for times in _MORE_TO_SHOW:
        if len(schedule) * times > _MOST_BLOCKS_TO_SHOW or find_phases(schedule) is not None:
            return schedule
        schedule = unroll(plan, count * times)
    return schedule


def _enough_to_show(problem: PlacementProblem, kernel: Kernel) -> int:
    """Micro-batches for a warm-up, two kernels and a cool-down."""
    ends = [start + problem.span[index % problem.nblocks] for index, start in enumerate(kernel.starts)]
    deep = -(-(max(ends) - min(kernel.starts)) // kernel.length)
    return kernel.copies * (deep + 2)


def _proof(problem: PlacementProblem, steady: Steady, seconds: float) -> Proof:
    return Proof(
        float(problem.real(steady.kernel.period)),
        float(problem.real(steady.bound)),
        steady.optimal,
        steady.method,
        seconds,
        tuple(steady.notes),
    )


def _plain(cap: float) -> Number:
    return int(cap) if float(cap).is_integer() else cap
