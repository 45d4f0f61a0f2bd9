"""Checked: the proof that a step splits, held against numbers before the first step that relies on it."""

from __future__ import annotations

from gemini.batch_analysis.loss_tape import Tape
from gemini.capture.call_binding import Call
from gemini.planner.step_plan import StepPlan
from gemini.quiet_warnings import muted
from gemini.runtime.deferred import Pending
from gemini.runtime.interception.local_mode import here
from gemini.runtime.pipelined.loss_request import Prepared
from gemini.runtime.pipelined.without_hooks import hookless
from gemini.snapshot.model_state import undrawn


def checked(plan: StepPlan, prepared: Prepared, pending: Pending, tape: Tape, root: int) -> Prepared:
    """The same, or why not; everything is left as it was. Raises SplittingError where this batch is another case."""
    from gemini.batch_analysis.numeric_check import check
    from gemini.batch_analysis.tail_check import check_tail

    args, kwargs = pending.call.with_tensors([one.detach() for one in pending.inputs])
    given = None if pending.work.foreign is None else pending.work.foreign.results
    with here(), hookless(pending.work.model), undrawn(), muted():
        if plan.tail is not None:
            reason = check_tail(plan.forms, plan.tail.nodes, prepared.splitting, Call(args, kwargs), given)
        else:
            reason = check(plan.forms, tape, root, prepared.splitting, args, kwargs, given)
    return Prepared(f"numbers speak against splitting it: {reason}") if reason else prepared
