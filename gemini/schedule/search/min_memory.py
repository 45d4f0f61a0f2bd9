"""The least memory at the shortest period.

All limits are lowered together, halving the distance to the least that residence times allow, while kernels of the same
length are found; the final limit of each device is the peak of the smallest kernel found.
"""

from __future__ import annotations

import math
from fractions import Fraction

from gemini.schedule.block import Number
from gemini.schedule.bounds import least_memory
from gemini.schedule.search.beam_search import Budget, Effort
from gemini.schedule.search.kernel import Kernel, normalise, steady_peak
from gemini.schedule.search.steady_state import SteadySearch

_EFFORTS = (Effort(4, 4), Effort(64, 6))
_FINEST = 256


def slimmest(search: SteadySearch) -> tuple[Kernel, tuple[Number, ...]]:
    """The kernel of the best length with the smallest largest peak, and its peak on each device."""
    problem, best = search.problem, search.best.kernel
    peaks = _peaks(search, best)
    amounts = [abs(amount) for amount in problem.memory if amount]
    least = max(least_memory(problem, dev, best.period) for dev in range(problem.ndevs))
    known = max(peaks)
    # Peaks are sums of the blocks' amounts: smaller steps than these (or a small share of the peak) are useless.
    step = max(min(amounts, default=known), known / _FINEST) if known else 1
    low, high = max(0, math.ceil(least / Fraction(step)) - 1), math.ceil(known / step)
    while high - low > 1:
        middle = (low + high) // 2
        kernel = _below(search, best, middle * step)
        if kernel is None:
            low = middle
        else:
            best, peaks = kernel, _peaks(search, kernel)
            high = min(middle, math.ceil(max(peaks) / step))
    return normalise(problem.times(best.copies), best), peaks


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
