"""A plan that is asked for by its file: whether it can run here at all, before anything does."""

from __future__ import annotations

from pathlib import Path

from gemini.errors import InvalidPlanError
from gemini.schedule.schedplan import SchedPlan


def asked_plan(path: Path, nworkers: int, micro_batches: int) -> SchedPlan:
    """The plan of a file. Raises ArtifactError where it cannot be read, and InvalidPlanError where it breaks a rule
    (it deadlocks, it takes more memory than it says) or is for other workers or micro-batches than these."""
    plan = SchedPlan.load(path)
    if plan.ndevs != nworkers:
        raise InvalidPlanError(
            f"{path} is a plan for {plan.ndevs} workers, there are {nworkers}\n"
            "    → ask for as many workers, or compose a plan for these"
        )
    if plan.nmicros != micro_batches:
        raise InvalidPlanError(
            f"{path} is a plan for {plan.nmicros} micro-batches, a step has {micro_batches}\n"
            f"    → accum_degree={plan.nmicros}, or compose a plan for {micro_batches}"
        )
    if any(len(plan.device(block)) > 1 for block in plan):
        raise InvalidPlanError(
            f"{path} has blocks on several workers at once\n    → steps run blocks of one worker each"
        )
    try:
        return plan.validate()
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{path} cannot run: {error}") from None
