"""A plan loaded from a user's file, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import networkx

from gemini.errors import InvalidPlanError
from gemini.schedule.schedplan import SchedPlan


def load_user_plan(path: Path, nworkers: int, micro_batches: int, *, groups: bool = True) -> SchedPlan:
    """Read a plan file. Raises ArtifactError if it cannot be read, and InvalidPlanError if it breaks a rule (a
    deadlock, memory above its limits) or is for a different number of workers or micro-batches. Blocks on several
    workers at once are admitted with `groups`."""
    plan = SchedPlan.load(path)
    if plan.ndevs != nworkers:
        raise InvalidPlanError(
            f"{path} is a plan for {plan.ndevs} workers, there are {nworkers}\n"
            "    → request as many workers, or compose a plan for these"
        )
    count = plan.nmicros * replicas(plan)
    if count != micro_batches:
        raise InvalidPlanError(
            f"{path} is a plan for {count} micro-batches, a step has {micro_batches}\n"
            f"    → accum_degree={count}, or compose a plan for {micro_batches}"
        )
    _check_groups(plan, path, groups)
    try:
        return plan.validate()
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{path} cannot run: {error}") from None


def group_size(plan: SchedPlan) -> int:
    """Return the number of workers of the blocks that several workers run together; 1: there are none."""
    return max((len(plan.device(block)) for block in plan), default=1)


def _check_groups(plan: SchedPlan, path: Path, groups: bool) -> None:
    """Refuse groups of different sizes, and a stage whose blocks are on different groups."""
    sizes = sorted({len(plan.device(block)) for block in plan} - {1})
    if sizes and not groups:
        raise InvalidPlanError(
            f"{path} has blocks on several workers at once\n    → steps run blocks of one worker each"
        )
    if len(sizes) > 1 or (sizes and replicas(plan) > 1):
        what = "groups of " + " and ".join(map(str, sizes)) + " workers" if len(sizes) > 1 else "groups and replicas"
        raise InvalidPlanError(f"{path} has {what}\n    → all blocks on several workers need equally many of them")
    places: dict[int, set[tuple[int, ...]]] = {}
    for block in plan:
        places.setdefault(block.stage or 0, set()).add(tuple(sorted(plan.device(block))))
    moved = sorted(stage for stage, found in places.items() if sizes and len(found) > 1)
    if moved:
        raise InvalidPlanError(f"{path}: the blocks of stages {moved} are on different workers\n    → put each on one")


def replicas(plan: SchedPlan) -> int:
    """Count the model replicas of a plan: equal, independent parts of one micro-batch."""
    first = min((block.mid for block in plan), default=0)
    blocks = [block for block in plan if block.mid == first]
    parts = networkx.Graph()
    parts.add_nodes_from(block.stage for block in blocks)
    parts.add_edges_from((prev.stage, block.stage) for block in blocks for prev in block.before)
    stages = [sorted(one) for one in networkx.connected_components(parts)]
    sizes = {len(one) for one in stages}
    in_rows = all(one[-1] - one[0] == len(one) - 1 for one in stages)
    return len(stages) if len(sizes) == 1 and in_rows else 1
