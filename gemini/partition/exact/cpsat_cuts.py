"""All cuts at once: CP-SAT chooses a place for every cut within windows, the slowest worker as fast as can be.

Only where nothing but work counts: free links, no memory limits, no pins. Without OR-tools the cuts stay as they are.
"""

from __future__ import annotations

from typing import Any

from gemini.partition.exact.cpsat import cp_model, has_solver, solve
from gemini.partition.exact.device_order import Seats
from gemini.partition.exact.prefix_costs import Line

_NEAR = 24  # places on either side of each cut
_UNITS = 10**7  # that the work of all items is counted in
_GOOD = 1e-4  # as near to the ideal as it need be
_EFFORT = 0.2


def joint_cuts(line: Line, seats: Seats, cuts: list[int]) -> list[int] | None:
    """Better cuts, if there are any."""
    total = float(line.work[-1])
    limited = any(seat.memory_mb is not None for seat in seats)
    if not has_solver() or not total or line.moving is not None or line.pins or limited:
        return None
    ideal = total / line.problem.total_speed
    loads = [0.0] * line.problem.nparts
    for stage, seat in enumerate(seats):
        loads[seat.worker] += float(line.work[cuts[stage + 1]] - line.work[cuts[stage]]) / seat.speed
    if max(loads) <= ideal * (1 + _GOOD):
        return None
    work = [round(float(before) / total * _UNITS) for before in line.work]
    model = cp_model().CpModel()
    place, done = _places(model, line, cuts, work)
    slowest = model.new_int_var(0, int(max(loads) / total * _UNITS), "slowest")  # only better cuts are of use
    for worker in range(line.problem.nparts):
        speed = round(line.problem.workers[worker].speed * 1000)
        own = [done[s + 1] - done[s] for s, seat in enumerate(seats) if seat.worker == worker]
        model.add(sum(own) * 1000 <= slowest * speed)
    for cut in range(1, len(place)):
        model.add(place[cut - 1] + 1 <= place[cut])
        model.add_hint(place[cut], cuts[cut])
        model.add_hint(done[cut], work[cuts[cut]])
    model.minimize(slowest)
    found = solve(model, min(_EFFORT, line.problem.options.time_limit), gap=_GOOD)
    if found is None:
        return None
    return [found.value(one) for one in place]


def _places(model: Any, line: Line, cuts: list[int], work: list[int]) -> tuple[list[Any], list[Any]]:
    """The place of every cut, and the work before it."""
    place, done = [], []
    for cut, here in enumerate(cuts):
        inner = 0 < cut < len(cuts) - 1
        low, high = (max(0, here - _NEAR), min(line.size, here + _NEAR)) if inner else (here, here)
        place.append(model.new_int_var(low, high, f"cut{cut}"))
        done.append(model.new_int_var(work[low], work[high], f"work{cut}"))
        model.add_element(place[-1] - low, work[low : high + 1], done[-1])
    return place, done
