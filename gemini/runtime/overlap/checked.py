"""Checked: the proof that a step splits, held against numbers before the first step that relies on it."""

from __future__ import annotations

from gemini.capture.binding import Call
from gemini.capture.state import undrawn
from gemini.muting import muted
from gemini.planner.step_plan import StepPlan
from gemini.runtime.controller.here import here
from gemini.runtime.deferred import Pending
from gemini.runtime.overlap.hookless import hookless
from gemini.runtime.overlap.losses import Prepared
from gemini.step.tape import Tape


def checked(plan: StepPlan, prepared: Prepared, pending: Pending, tape: Tape, root: int) -> Prepared:
    """The same, or why not; everything is left as it was. Raises SplittingError where this batch is another case."""
    from gemini.splitting.checking import check
    from gemini.splitting.tail_checking import check_tail

    args, kwargs = pending.call.with_tensors([one.detach() for one in pending.inputs])
    given = None if pending.work.foreign is None else pending.work.foreign.results
    with here(), hookless(pending.work.model), undrawn(), muted():
        if plan.tail is not None:
            reason = check_tail(plan.forms, plan.tail.nodes, prepared.splitting, Call(args, kwargs), given)
        else:
            reason = check(plan.forms, tape, root, prepared.splitting, args, kwargs, given)
    return Prepared(f"numbers speak against splitting it: {reason}") if reason else prepared
