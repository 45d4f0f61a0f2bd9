"""Keeping: buffers that the stages of a plan write, and who may.

Every micro-batch finds such a buffer as it was before the step, and leaves in it what the whole batch would have left.
Meanwhile nobody else may look: the stage that writes it must be the only one that has it, in one worker.
"""

from __future__ import annotations

from gemini.planner.step_plan import StepPlan, UnplannableError
from gemini.splitting.effects import written_buffers

Once = tuple[tuple[int, ...], ...]


def find_written(plan: StepPlan) -> Once:
    """For every stage, the buffers that it writes, by place among its own; () where none does."""
    names = written_buffers(plan.graph)
    if not names:
        return ()
    buffers = dict(plan.graph.bound_model().named_buffers(remove_duplicate=False))
    written = {id(buffers[name]): name for name in names}
    stages = plan.build().stages
    found = tuple(tuple(at for at, one in enumerate(stage.buffers()) if id(one) in written) for stage in stages)
    for identity, name in written.items():
        holders = [at for at, stage in enumerate(stages) if any(id(one) == identity for one in stage.buffers())]
        if len(holders) > 1:
            raise UnplannableError(f"stages {holders} both use the buffer {name}, which is written")
    if any(found) and len({block.stage for block in plan.schedule}) > len(stages):
        raise UnplannableError(f"it writes the buffer {min(names)}, and {plan.name} has a stage in two places")
    return found if any(found) else ()
