"""The plan of a step: stages, who runs them, and in which order all micro-batches go through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.partition.figures import Analysis
    from gemini.pipe.piped import Piped
    from gemini.randomness.recording import Pattern
    from gemini.schedule.schedplan import SchedPlan
    from gemini.splitting.graph_forms import GraphForms


class UnplannableError(Exception):
    """A model cannot run by a plan; the text says why, for its user."""


@dataclass(frozen=True)
class StepPlan:
    """All that is fixed for calls of one kind.

    `draws` are the random numbers of each stage; `forms` say which values count samples; `shares` numbers the
    reductions over samples, by node of the graph, as the generated stages do.
    """

    piped: Piped
    schedule: SchedPlan
    name: str  # of the schedule
    micro_batches: int
    analysis: Analysis
    draws: tuple[tuple[Pattern, ...], ...]
    forms: GraphForms
    shares: dict[int, int]

    @property
    def step_ms(self) -> float:
        """How long a step is expected to take."""
        return self.analysis.step_ms

    def __str__(self) -> str:
        stages = len(self.piped.stages)
        balance = self.analysis.balance
        return (
            f"{stages} stages on {self.schedule.ndevs} workers, balance {balance:.3f}, {self.name} with "
            f"{self.micro_batches} micro-batches, {self.step_ms:.0f} ms a step expected"
        )
