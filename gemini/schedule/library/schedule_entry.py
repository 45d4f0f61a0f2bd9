"""Entry of the schedule library: name, placement, admissible sizes and orders of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemini.schedule.block import Action
from gemini.schedule.schedplan import SchedPlan

Orders = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule from the literature.

    `placement` names the shape it runs on (with the backward split where `split`), so that a composed plan for that
    placement can be compared with it; `chunks` is how many stages a device must hold, where only one number will do.
    `orders` gives what each device does, one after the other; `admits` says for which devices, micro-batches and
    chunks it exists, `admissible` says it in words. With `any_placement` it runs on every placement.
    """

    name: str
    description: str
    placement: str
    orders: Callable[[SchedPlan, int], Orders]
    split: bool = False
    chunks: int | None = None
    admits: Callable[[int, int, int], bool] = lambda _devices, _micros, _chunks: True
    admissible: str = "any number of devices and micro-batches"
    any_placement: bool = False


def chunks_of(placement: SchedPlan) -> int:
    """How many stages a device holds in a pipeline placement."""
    return max(1, len({block.stage for block in placement}) // placement.ndevs)
