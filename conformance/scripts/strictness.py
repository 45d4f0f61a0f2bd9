"""By which limit a run agrees with another: the strictest that it meets.

    equal        the same digits are printed, the same bits saved
    threads      off by at most ten times what `python` with two threads is off from `python` with one
    last bits    the same, of `python` with other last bits of weights and gradients (`last_bits`). It stands in where
                 ops are too small for a second thread: then two threads change nothing at all, and ten times nothing
                 would ask for the bits of one order of sums, which no schedule of micro-batches keeps
    last digit   off by one in the last digit printed, as numbers can be that differ as little as numbers can
    beyond       off by more

What has drifted apart once stays so: a number may be off by as much as the noise was off up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conformance.scripts import comparison as comparing

EQUAL, THREADS, BITS, DIGIT, BEYOND = LIMITS = ("equal", "threads", "last bits", "last digit", "beyond")
BY_THE_LETTER = (EQUAL, THREADS)
STRICT = (*BY_THE_LETTER, BITS)


def weakest(limits: Sequence[str]) -> str:
    """The limit that all of them meet."""
    return max(limits, key=LIMITS.index, default=EQUAL)


def printed(theirs: str, ours: str, threads: Callable[[], str], bits: Sequence[Callable[[], str]]) -> tuple[str, str]:
    """The limit that all printed numbers meet, and the first that meets no stricter one.

    Runs are asked for until all is explained: `bits` are several, as one shows only some of the noise.
    """
    one, other = comparing.numbers(theirs), comparing.numbers(ours)
    off = {at: comparing.off(a, b) for at, (a, b) in enumerate(zip(one, other)) if a.value != b.value}
    off = {at: value for at, value in off.items() if value}
    if not off:
        return EQUAL, ""
    noises = {THREADS: _noise(theirs, threads()), BITS: [0.0] * len(one)}
    for draw in bits:
        if all(_limit(value, noises, at) != BEYOND for at, value in off.items()):
            break
        noises[BITS] = [*map(max, noises[BITS], [*_noise(theirs, draw()), *noises[BITS]])]
    found = {at: _limit(value, noises, at) for at, value in off.items()}
    found = {
        at: DIGIT if limit == BEYOND and not comparing.apart(one[at], other[at]) else limit
        for at, limit in found.items()
    }
    worst = weakest([*found.values()])
    at = next(at for at, limit in found.items() if limit == worst)
    noise = max((noises[name][at] for name in noises if at < len(noises[name])), default=0.0)
    return worst, f"number {at}: {one[at].value} became {other[at].value}, off by {off[at]:.1e}, noise {noise:.1e}"


def saved(
    deviations: dict[str, float],
    threads: Callable[[], dict[str, float]],
    bits: Sequence[Callable[[], dict[str, float]]],
) -> tuple[str, str]:
    """The limit that all saved tensors meet, and the first that meets no stricter one."""
    off = {name: value for name, value in deviations.items() if value}
    if not off:
        return EQUAL, ""
    noises: dict[str, dict[str, float]] = {THREADS: threads(), BITS: {}}

    def limit(name: str, value: float) -> str:
        return next((one for one in noises if value <= comparing.FACTOR * noises[one].get(name, 0.0)), BEYOND)

    for draw in bits:
        if all(limit(name, value) != BEYOND for name, value in off.items()):
            break
        noises[BITS] = {name: max(value, noises[BITS].get(name, 0.0)) for name, value in draw().items()}
    found = {name: limit(name, value) for name, value in off.items()}
    worst = weakest([*found.values()])
    name = max((name for name, limit in found.items() if limit == worst), key=lambda name: off[name])
    noise = max(noise.get(name, 0.0) for noise in noises.values())
    return worst, f"{name} is off by {off[name]:.1e}, noise {noise:.1e}"


def _noise(theirs: str, other: str) -> list[float]:
    pairs = zip(comparing.numbers(theirs), comparing.numbers(other))
    return comparing.grown([comparing.off(a, b) for a, b in pairs])


def _limit(value: float, noises: dict[str, list[float]], at: int) -> str:
    for name, noise in noises.items():
        if noise and value <= comparing.FACTOR * noise[min(at, len(noise) - 1)]:
            return name
    return BEYOND
