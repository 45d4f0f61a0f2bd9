"""An executed step as a plan, a trace and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.errors import InvalidPlanError
from gemini.runtime.pipelined.step_trace import ExecutedAction, StepTrace, executed_plan
from gemini.schedule.export.perfetto import load_trace
from gemini.schedule.library import library
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import simulate


def ran_slower(plan: SchedPlan) -> list[ExecutedAction]:
    times = simulate(plan, jitter=0.3, seed=1).times
    return [ExecutedAction(plan.device(block)[0], block.action, *times[block]) for block in times]


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_step_is_saved_as_it_ran(name: str, tmp_path: Path) -> None:
    plan = library(name, 2, 4)
    measured = executed_plan(plan, ran_slower(plan))
    assert [[b.action for b in measured.device_blocks(d)] for d in (0, 1)] == [
        [b.action for b in plan.device_blocks(d)] for d in (0, 1)
    ]
    trace = StepTrace(plan, measured, 50.0, 40.0, (10.0, 12.0), (11.0, 11.0))
    assert "+25.0%" in str(trace)
    assert "12 MB, 11 predicted" in str(trace)
    assert 0 < trace.bubble < 0.5
    files = trace.save(tmp_path / "run")
    assert load_trace(files[0]).nsteps == measured.nsteps
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_other_actions_than_planned_are_refused() -> None:
    plan = library("1f1b", 2, 4)
    with pytest.raises(InvalidPlanError, match="planned but not run: 0F0"):
        executed_plan(plan, [one for one in ran_slower(plan) if str(one.action) != "0F0"])
    with pytest.raises(InvalidPlanError, match="not planned: 3F9"):
        executed_plan(
            plan,
            [*ran_slower(plan), ExecutedAction(0, library("1f1b", 4, 10).all_blocks()[-1].action.parse("3F9"), 0, 1)],
        )


def test_the_picture_says_what_was_planned_and_what_was_measured() -> None:
    plan = library("1f1b", 2, 4)
    measured = executed_plan(plan, ran_slower(plan))
    trace = StepTrace(plan, measured, 50.0, 40.0, (10.0, 12.0), (11.0, 11.0))
    for title, shown in ((trace.planned_title, plan), (trace.measured_title, measured)):
        assert f": {float(shown.nsteps):.1f} ms from first action to last, " in title  # the time axis
    assert trace.planned_title.endswith("40.0 ms per step")
    assert trace.measured_title.endswith("50.0 ms per step")
    assert ("against the plan", "+25.0%") in trace.measured_facts
    told = dict(trace.measured_facts)
    assert told["bubble"] == f"{trace.bubble:.1%}"
    assert told["largest worker"] == "12 MB"
    inside = float(measured.nsteps)
    assert told["before and after"] == f"{50.0 - inside:.1f} ms"
    assert dict(trace.planned_facts)["bubble"] == "20.0%"  # 1F1B: 3 of 15 units


def test_what_the_profile_said_is_told_beside_what_steps_say() -> None:
    plan = library("1f1b", 2, 4)
    trace = StepTrace(plan, executed_plan(plan, ran_slower(plan)), 50.0, 40.0, profiled_ms=25.0)
    assert "40.0 predicted (+25.0%), 25.0 by the profile alone (+100.0%)" in str(trace)
    assert dict(trace.planned_facts)["by the profile alone"] == "25.0 ms"
