"""Schedules from the literature as plans, for any number of devices and micro-batches that they admit.

    plan = library("1f1b", ndevs=4, nmicros=8)
    library_for(placement)          # the names of those that run on a placement, to compare a composed plan with

Each is defined by the order of blocks on every device; times are the earliest that this order allows.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import InvalidPlanError, PlacementError
from gemini.nearest_name import remedy
from gemini.schedule.block import Action, Number
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.library.chimera import CHIMERA
from gemini.schedule.library.dualpipe_v import DUALPIPE_V
from gemini.schedule.library.gpipe import GPIPE
from gemini.schedule.library.interleaved import INTERLEAVED_1F1B, INTERLEAVED_ZB
from gemini.schedule.library.looped_bfs import LOOPED_BFS
from gemini.schedule.library.one_f_one_b import ONE_F_ONE_B
from gemini.schedule.library.schedule_entry import ScheduleEntry, chunks_of
from gemini.schedule.library.zb_v import ZB_V
from gemini.schedule.library.zero_bubble import ZB_H1, ZB_H2
from gemini.schedule.placements import PLACEMENTS, PerStage
from gemini.schedule.placements import placement as named_placement
from gemini.schedule.schedplan import SchedPlan

__all__ = ["LIBRARY", "ScheduleEntry", "library", "library_for", "library_on"]

LIBRARY: dict[str, ScheduleEntry] = {
    known.name: known
    for known in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED_1F1B,
        LOOPED_BFS,
        ZB_H1,
        ZB_H2,
        INTERLEAVED_ZB,
        ZB_V,
        DUALPIPE_V,
        CHIMERA,
    )
}


_PLENTY = 1_000_000  # enough micro-batches for any schedule that requires a minimum


def library(
    name: str,
    ndevs: int,
    nmicros: int,
    *,
    chunks: int | None = None,
    forward: PerStage = 1,
    backward: PerStage = 2,
    input_gradient: PerStage = 1,
    weight_gradient: PerStage = 1,
    memory: PerStage = 1,
    input_release: Number = 0.5,
    nbytes: Number = 0,
) -> SchedPlan:
    """The schedule `name` of `LIBRARY`; spans and memory are one number for all stages or one per stage."""
    known = _find_entry(name)
    chunked = PLACEMENTS[known.placement].chunked
    if chunks is not None and not chunked:
        raise PlacementError(f"{chunks!r} chunks for {name}, which has one stage per device\n    → leave chunks out")
    if known.chunks is not None and chunks not in (None, known.chunks):
        raise PlacementError(f"{chunks!r} chunks for {name}\n    → it has {known.chunks}: leave chunks out")
    placement = named_placement(
        known.placement,
        ndevs,
        split=known.split,
        chunks=chunks,
        forward=forward,
        backward=backward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        memory=memory,
        input_release=input_release,
        nbytes=nbytes,
    )
    return library_on(name, placement, nmicros)


def library_on(name: str, placement: SchedPlan, nmicros: int) -> SchedPlan:
    """The schedule `name` on a user placement, with its spans, memory and links."""
    known = _find_entry(name)
    if isinstance(nmicros, bool) or not isinstance(nmicros, int) or nmicros < 1:
        raise PlacementError(f"{nmicros!r} micro-batches for {name}\n    → give a number, 1 or more")
    if not _same_shape(known, placement):
        raise PlacementError(
            f"{name} does not run on this placement\n    → it runs on {known.placement}"
            + (" with the backward split" if known.split else "")
            + f"; on this one run: {', '.join(library_for(placement)) or 'none'}"
        )
    chunks = chunks_of(placement)
    if not known.admits(placement.ndevs, nmicros, chunks):
        raise PlacementError(
            f"{name} does not exist for {placement.ndevs} devices, {nmicros} micro-batches and {chunks} "
            f"chunk{'s' if chunks > 1 else ''} per device\n    → it needs {known.admissible}"
        )
    return plan_from_orders(placement, known.orders(placement, nmicros)).validate()


def library_for(placement: SchedPlan, nmicros: int | None = None) -> list[str]:
    """The schedules of the library that run on `placement` (and for `nmicros` micro-batches, if set)."""
    names = []
    for name, known in LIBRARY.items():
        count = _PLENTY if nmicros is None else nmicros
        if not _same_shape(known, placement) or not known.admits(placement.ndevs, count, chunks_of(placement)):
            continue
        try:
            if nmicros is not None:
                library_on(name, placement, nmicros)
            names.append(name)
        except InvalidPlanError:  # memory limits or dependencies of the placement that the order violates
            continue
    return names


def _find_entry(name: str) -> ScheduleEntry:
    known = LIBRARY.get(name)
    if known is None:
        raise PlacementError(f"unknown schedule {name!r}\n    → {remedy(str(name), LIBRARY)}")
    return known


def _same_shape(known: ScheduleEntry, placement: SchedPlan) -> bool:
    """Whether `placement` has the blocks, devices and dependencies that the schedule's own has (it may have more
    dependencies, such as from a forward to its own backward)."""
    if known.any_placement:
        return True
    shape = PLACEMENTS[known.placement]
    if not shape.admits(placement.ndevs):
        return False
    chunks = chunks_of(placement) if shape.chunked else None
    if known.chunks is not None and chunks != known.chunks:
        return False
    own = named_placement(known.placement, placement.ndevs, split=known.split, chunks=chunks)
    return _block_devices(own) == _block_devices(placement) and _edges(own) <= _edges(placement)


def _block_devices(placement: SchedPlan) -> dict[tuple[int, str], tuple[int, ...]]:
    return {(block.action.stage, block.btype): placement.device(block) for block in placement}


def _edges(placement: SchedPlan) -> set[tuple[Action, Action]]:
    return {(replace(prev.action, mid=0), replace(block.action, mid=0)) for block in placement for prev in block.before}
