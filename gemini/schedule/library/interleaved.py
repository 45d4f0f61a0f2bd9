"""Interleaved 1F1B: several chunks of the model a device, micro-batches in groups of P.

Two devices, two chunks (stages 0 and 2 on device 0, 1 and 3 on device 1), four micro-batches:

    dev 0   0F0 0F1 2F0 2F1 0F2   . 2B0 ─── 0F3 2B1 ─── 2F2 0B0 ─── …
    dev 1     . 1F0 1F1 3F0 3B0 ─── 3F1 3B1 ─── 1F2 1B0 ─── …

A chunk is 1/v of a device's work, so the bubble is too: makespan (N·v + P − 1)(F + B) with F and B those of a chunk.
It holds more: device d starts with (v − 1)·P + 2·(P − 1 − d) forwards before its first backward. N need not be a
multiple of P: groups are then of nearly equal size, at least P.
"""

from __future__ import annotations

from itertools import pairwise

from gemini.schedule.block import BACKWARD, FORWARD, Action
from gemini.schedule.library.known import Known, Orders, chunks_of
from gemini.schedule.schedplan import SchedPlan


def orders(placement: SchedPlan, nmicros: int) -> Orders:
    """Forwards group by group and in it chunk by chunk; backwards the same with chunks the other way round."""
    ndevs, chunks = placement.ndevs, chunks_of(placement)
    groups = split_evenly(nmicros, max(1, nmicros // ndevs))
    rows = []
    for dev in range(ndevs):
        stages = [lap * ndevs + dev for lap in range(chunks)]
        forwards = [Action(stage, FORWARD, mid) for group in groups for stage in stages for mid in group]
        backwards = [Action(stage, BACKWARD, mid) for group in groups for stage in stages[::-1] for mid in group]
        warm = min((chunks - 1) * len(groups[0]) + 2 * (ndevs - 1 - dev), len(forwards))
        row = forwards[:warm]
        for forward, backward in zip(forwards[warm:], backwards):
            row += [forward, backward]
        rows.append(row + backwards[len(forwards) - warm :])
    return rows


def split_evenly(nmicros: int, ngroups: int) -> list[range]:
    """`ngroups` consecutive ranges of micro-batches whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(nmicros, ngroups)
    bounds = [0]
    for index in range(ngroups):
        bounds.append(bounds[-1] + size + (index < extra))
    return [range(begin, end) for begin, end in pairwise(bounds)]


INTERLEAVED_1F1B = Known(
    "interleaved_1f1b",
    "1F1B over several chunks a device: a bubble v times smaller for more memory",
    "interleaved",
    orders,
    admits=lambda _devices, _micros, chunks: chunks >= 2,
    admissible="2 chunks a device or more (with one chunk it is 1f1b), any number of devices and micro-batches",
)
