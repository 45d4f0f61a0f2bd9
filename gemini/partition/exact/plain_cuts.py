"""Plain cuts: of stages that are equally fast within the noise of the profile, those a person would choose.

one stage per worker      unless more stages win more than the noise, which the facts then say
module boundaries         a cut between `layer.1` and `layer.2` rather than inside `layer.1.output`
fewer transfers           of cuts at equal boundaries

                layer.1.output.dense │ layer.1.output.LayerNorm    2 common scopes and the layer
layer.1.output.LayerNorm │ layer.2.attention.query                 2 common scopes: plainer
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from gemini.partition.exact.chunked import evaluate_cuts
from gemini.partition.exact.contiguous import ROUNDING
from gemini.partition.exact.device_order import StageSlots, slot_orders
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.item_orders import item_orders
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

LEAST_GAIN = 0.02  # of the slowest worker: what less plain cuts must win at least
_ROUNDS = 3


def worth_searching(problem: Problem, straight: Assignment, bound_ms: float) -> bool:
    """Whether other stages than straight ones could win more than the noise of the profile."""
    options = problem.options
    threshold = 0.0 if options.noise is None else max(options.noise, LEAST_GAIN)
    return options.rivals and time_ms(problem, straight) > bound_ms * (1 + max(ROUNDING, options.near, threshold))


def prefer_plain(problem: Problem, straight: Assignment, found: Assignment) -> Assignment:
    """Return `found`, or straight stages at plain cuts that are as fast within the noise of the profile."""
    noise = problem.options.noise
    if noise is None or problem.nparts < 2:
        return found
    before, after = time_ms(problem, straight), time_ms(problem, found)
    gain = 1 - after / before if before else 0.0
    if gain <= max(noise, LEAST_GAIN):
        return _move_to_boundaries(problem, straight)
    nstages = len(set(found.stage_of))
    if nstages <= problem.nparts:
        return found
    text = (
        f"{nstages} stages: the slowest worker is {gain:.1%} faster than with {problem.nparts} "
        f"(the noise of the profile is {noise:.1%})"
    )
    return replace(found, facts={**found.facts, "more_stages": text})


def time_ms(problem: Problem, found: Assignment) -> float:
    """Return the time of the slowest worker."""
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))


def _move_to_boundaries(problem: Problem, found: Assignment) -> Assignment:
    """Return straight contiguous stages with each cut at the plainest place within `LEAST_GAIN`."""
    order = item_orders(problem).get(str(found.facts.get("order")))
    slots = _slots_of(problem, found)
    if found.facts.get("method") != "contiguous" or order is None or slots is None:
        return found
    costs = SegmentCosts(problem, order)
    cuts = _cuts_of(found, order)
    limit = time_ms(problem, found) * (1 + LEAST_GAIN)
    plainness = _plainness(problem, order)
    for _ in range(_ROUNDS):
        before = list(cuts)
        for at in range(1, len(cuts) - 1):
            _move_cut(costs, slots, cuts, at, limit, plainness)
        if cuts == before:
            break
    stage_of = [0] * len(problem.items)
    for stage, (start, end) in enumerate(itertools.pairwise(cuts)):
        for item in order[start:end]:
            stage_of[item] = stage
    return replace(found, stage_of=tuple(stage_of))


def _slots_of(problem: Problem, found: Assignment) -> StageSlots | None:
    """Return the slots of an assignment of one stage per worker."""
    wanted = list(found.worker_of)
    return next((slots for slots in slot_orders(problem) if [slot.worker for slot in slots] == wanted), None)


def _cuts_of(found: Assignment, order: tuple[int, ...]) -> list[int]:
    stages = [found.stage_of[item] for item in order]
    return [0, *(at for at in range(1, len(stages)) if stages[at] != stages[at - 1]), len(stages)]


def _plainness(problem: Problem, order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return, of the cut before each place of an order: common scopes of its two sides, values that cross it."""
    place = {item: at for at, item in enumerate(order)}
    crossing = np.zeros(len(order) + 1, dtype=int)
    for producer, readers in problem.readers:
        last = max((place[reader] for reader in readers), default=place[producer])
        crossing[place[producer] + 1] += 1
        crossing[last + 1] -= 1
    crossing = np.cumsum(crossing)
    depths = [0, *(_common(problem.items[a].scope, problem.items[b].scope) for a, b in itertools.pairwise(order))]
    return [(depth, int(crossing[at])) for at, depth in enumerate(depths)]


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def _move_cut(  # noqa: PLR0917
    costs: SegmentCosts, slots: StageSlots, cuts: list[int], at: int, limit: float, plainness: list[tuple[int, int]]
) -> None:
    """Move one cut to the plainest place where its two stages stay within the limit."""
    left, current, right = cuts[at - 1 : at + 2]
    places = range(left + 1, right)
    before = costs.times(range(left, left + 1), places, slots[at - 1].speed).ravel()
    after = costs.times(places, range(right, right + 1), slots[at].speed).ravel()
    within = np.flatnonzero(np.maximum(before, after) <= limit * (1 + ROUNDING))
    wanted = sorted(
        (places[one] for one in within if plainness[places[one]] < plainness[current]),
        key=lambda place: (plainness[place], abs(place - current)),
    )
    for place in wanted:
        moved = [*cuts[:at], place, *cuts[at + 1 :]]
        one = evaluate_cuts(costs, slots, moved)
        if one is not None and one.ms <= limit * (1 + ROUNDING):
            cuts[at] = place
            return
