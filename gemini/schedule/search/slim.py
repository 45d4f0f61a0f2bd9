"""The least memory at the shortest period.

All limits are lowered together, as shares of what the best kernel so far needs, until no kernel of the same length is
found any more; then each device's limit is what the slimmest kernel really uses.
"""

from __future__ import annotations

from gemini.schedule.block import Number
from gemini.schedule.search.beam import Budget, Effort
from gemini.schedule.search.kernel import Kernel, normalised, steady_peak
from gemini.schedule.search.steady import SteadySearch

_EFFORTS = (Effort(4, 4), Effort(64, 6))
_MOST_STEPS = 200


def slimmest(search: SteadySearch) -> tuple[Kernel, tuple[Number, ...]]:
    """The kernel of the best length with the smallest largest peak, and its peak on each device."""
    best = search.best.kernel
    peaks = _peaks(search, best)
    amounts = sorted({abs(amount) for amount in search.problem.memory if amount})
    if not amounts:
        return normalised(search.problem.times(best.copies), best), peaks
    step = amounts[0]
    floor = amounts[-1]
    for _ in range(_MOST_STEPS):
        target = max(peaks) - step
        if target < floor:
            break
        kernel = _below(search, best, target)
        if kernel is None:
            break
        best, peaks = kernel, _peaks(search, kernel)
    return normalised(search.problem.times(best.copies), best), peaks


def _below(search: SteadySearch, best: Kernel, target: Number) -> Kernel | None:
    caps = [min(cap, float(target)) for cap in search.problem.caps]
    tighter = search.under(search.problem.with_caps(caps))
    for effort in _EFFORTS:
        kernel = tighter.at_length(best.length, best.copies, effort, None, Budget(deadline=search.deadline))
        if kernel is not None:
            return kernel
    return None


def _peaks(search: SteadySearch, kernel: Kernel) -> tuple[Number, ...]:
    problem = search.problem.times(kernel.copies)
    return tuple(steady_peak(problem, kernel.length, kernel.starts, dev) for dev in range(problem.ndevs))
