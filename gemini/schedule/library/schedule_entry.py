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
    placement can be compared with it; `chunks` is the required number of stages per device, if only one is valid.
    `orders` returns the order of each device; `admits` is the predicate on devices, micro-batches and chunks for which
    the schedule exists, `admissible` its description. With `any_placement` it runs on every placement.
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
    """The number of stages per device in a pipeline placement."""
    return max(1, len({block.stage for block in placement}) // placement.ndevs)
