"""Interleaved 1F1B: several chunks of the model per device, micro-batches in groups of P.

Two devices, two chunks (stages 0 and 2 on device 0, 1 and 3 on device 1), four micro-batches:

    dev 0   0F0 0F1 2F0 2F1 0F2   . 2B0 ─── 0F3 2B1 ─── 2F2 0B0 ─── …
    dev 1     . 1F0 1F1 3F0 3B0 ─── 3F1 3B1 ─── 1F2 1B0 ─── …

A chunk is 1/v of a device's work, so the bubble is too: makespan (N·v + P − 1)(F + B) with F and B those of a chunk.
It holds more: device d starts with (v − 1)·P + 2·(P − 1 − d) forwards before its first backward. N need not be a
multiple of P: groups are then of nearly equal size, at least P.

With the backward split, weight gradients wait until they fill a gap and the warm-up can be shorter by P − 1 − d.
"""

from __future__ import annotations

from itertools import pairwise

from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from gemini.schedule.library.schedule_entry import Orders, ScheduleEntry, chunks_of
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """(v − 1)·P + 2·(P − 1 − d) forwards, then forward and backward in turn."""
    rows = []
    for dev in range(placement.ndevs):
        forwards, backwards = _sequences(placement, dev, nmicros, BACKWARD)
        warm = min(_count_warmup(placement, nmicros) + 2 * (placement.ndevs - 1 - dev), len(forwards))
        row = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards):
            row += [forward, backward]
        rows.append(row + backwards[len(forwards) - warm :])
    return rows


def orders_split(placement: SchedPlan, nmicros: int) -> Orders:
    """(v − 1)·P + (P − 1 − d) forwards, then forward, input gradient and, d behind, weight gradient in turn."""
    rows = []
    for dev in range(placement.ndevs):
        forwards, inputs = _sequences(placement, dev, nmicros, INPUT_GRADIENT)
        warm = min(_count_warmup(placement, nmicros) + placement.ndevs - 1 - dev, len(forwards))
        row = forwards[:warm]
        weights = [Action(action.stage, WEIGHT_GRADIENT, action.mid) for action in inputs]
        for index, action in enumerate(inputs):
            row += [*forwards[warm + index : warm + index + 1], action]
            row += weights[index - dev : index - dev + 1] if index >= dev else []
        rows.append(row + weights[len(inputs) - min(dev, len(inputs)) :])
    return rows


def _sequences(placement: SchedPlan, dev: int, nmicros: int, gradient: str) -> tuple[list[Action], list[Action]]:
    """Forwards group by group and within it chunk by chunk; gradients the same with chunks in reverse."""
    ndevs = placement.ndevs
    stages = [lap * ndevs + dev for lap in range(chunks_of(placement))]
    groups = split_evenly(nmicros, max(1, nmicros // ndevs))
    return (
        [Action(stage, FORWARD, mid) for group in groups for stage in stages for mid in group],
        [Action(stage, gradient, mid) for group in groups for stage in stages[::-1] for mid in group],
    )


def _count_warmup(placement: SchedPlan, nmicros: int) -> int:
    """Forwards until the last device has its first micro-batch at the last chunk."""
    first = split_evenly(nmicros, max(1, nmicros // placement.ndevs))[0]
    return (chunks_of(placement) - 1) * len(first)


def split_evenly(nmicros: int, ngroups: int) -> list[range]:
    """`ngroups` consecutive ranges of micro-batches whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(nmicros, ngroups)
    bounds = [0]
    for index in range(ngroups):
        bounds.append(bounds[-1] + size + (index < extra))
    return [range(begin, end) for begin, end in pairwise(bounds)]


_ADMISSIBLE = "2 chunks per device or more (with one chunk it is {}), any number of devices and micro-batches"

INTERLEAVED_1F1B = ScheduleEntry(
    "interleaved_1f1b",
    "1F1B over several chunks per device: a bubble v times smaller for more memory",
    "interleaved",
    orders,
    admits=lambda _devices, _micros, chunks: chunks >= 2,
    admissible=_ADMISSIBLE.format("1f1b"),
)

INTERLEAVED_ZB = ScheduleEntry(
    "interleaved_zb",
    "interleaved 1F1B with the backward split, weight gradients fill the bubble",
    "interleaved",
    orders_split,
    split=True,
    admits=lambda _devices, _micros, chunks: chunks >= 2,
    admissible=_ADMISSIBLE.format("zb_h1"),
)
