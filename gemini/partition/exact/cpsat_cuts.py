"""Joint optimisation of all cuts: CP-SAT places every cut within a window to minimise the bottleneck.

Only for problems with free links, no memory limits and no pins. Without OR-tools the cuts are left unchanged.
"""

from __future__ import annotations

from typing import Any

from gemini.cpsat_library import has_cpsat, import_cpsat
from gemini.partition.exact.cpsat import solve
from gemini.partition.exact.device_order import StageSlots
from gemini.partition.exact.prefix_costs import SegmentCosts

_NEAR = 24  # positions on either side of each cut
_UNITS = 10**7  # for the work of all items
_GOOD = 1e-4  # relative gap to the ideal that is good enough
_EFFORT = 0.2


def optimize_cuts(costs: SegmentCosts, slots: StageSlots, cuts: list[int]) -> list[int] | None:
    """Return better cuts, if any."""
    total = float(costs.work[-1])
    limited = any(slot.memory_mb is not None for slot in slots)
    if not has_cpsat() or not total or costs.transfer_ms is not None or costs.pins or limited:
        return None
    ideal = total / costs.problem.total_speed
    loads = [0.0] * costs.problem.nparts
    for stage, slot in enumerate(slots):
        loads[slot.worker] += float(costs.work[cuts[stage + 1]] - costs.work[cuts[stage]]) / slot.speed
    if max(loads) <= ideal * (1 + _GOOD):
        return None
    work = [round(float(before) / total * _UNITS) for before in costs.work]
    model = import_cpsat().CpModel()
    place, done = _add_cut_variables(model, costs, cuts, work)
    slowest = model.new_int_var(0, int(max(loads) / total * _UNITS), "slowest")  # only better cuts
    for worker in range(costs.problem.nparts):
        speed = round(costs.problem.workers[worker].speed * 1000)
        own = [done[s + 1] - done[s] for s, slot in enumerate(slots) if slot.worker == worker]
        model.add(sum(own) * 1000 <= slowest * speed)
    for cut in range(1, len(place)):
        model.add(place[cut - 1] + 1 <= place[cut])
        model.add_hint(place[cut], cuts[cut])
        model.add_hint(done[cut], work[cuts[cut]])
    model.minimize(slowest)
    found = solve(model, min(_EFFORT, costs.problem.options.time_limit), gap=_GOOD)
    if found is None:
        return None
    return [found.value(one) for one in place]


def _add_cut_variables(
    model: Any, costs: SegmentCosts, cuts: list[int], work: list[int]
) -> tuple[list[Any], list[Any]]:
    """Add variables for the position of every cut and the work before it."""
    place, done = [], []
    for cut, current in enumerate(cuts):
        inner = 0 < cut < len(cuts) - 1
        low, high = (max(0, current - _NEAR), min(costs.size, current + _NEAR)) if inner else (current, current)
        place.append(model.new_int_var(low, high, f"cut{cut}"))
        done.append(model.new_int_var(work[low], work[high], f"work{cut}"))
        model.add_element(place[-1] - low, work[low : high + 1], done[-1])
    return place, done
