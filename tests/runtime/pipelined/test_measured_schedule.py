"""Predicted step times follow the measured ones."""

from __future__ import annotations

import gc
import marshal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.planner.step_plan import StepPlan
from gemini.runtime.interception import dispatch
from gemini.runtime.pipelined.measured_schedule import ScheduleTimings, predict_from_steps
from gemini.runtime.pipelined.step_request import ExecutedStep, TraceEvent, decode_events
from gemini.schedule.block import LETTERS
from gemini.schedule.library import library
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import simulate


def told(plan: SchedPlan, factor: float, seed: int) -> tuple[list[TraceEvent], float]:
    """A step that takes so many times as long as planned, with some noise; and 3 ms around it."""
    ran = simulate(plan, jitter=0.02, seed=seed)
    events = [
        TraceEvent(
            plan.device(b)[0], LETTERS[b.btype], b.stage or 0, b.mid, *(float(at) * factor / 1e3 for at in times)
        )
        for b, times in ran.times.items()
    ]
    return events, float(ran.makespan) * factor + 3.0


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_steps_that_ran_tell_what_the_next_takes(name: str) -> None:
    """Twice as slow as planned, every time, but for one that was disturbed."""
    plan = library(name, 2, 6)
    steps = [told(plan, factor, seed) for seed, factor in enumerate((2.0, 5.0, 2.0, 2.0))]
    found = predict_from_steps(plan, steps)
    assert found.step_ms == pytest.approx(told(plan, 2.0, 9)[1], rel=0.05)
    for device in range(2):
        expected = [block.action for block in found.schedule.device_blocks(device)]
        assert expected == [block.action for block in plan.device_blocks(device)]
    assert found.schedule.validate() is found.schedule


def test_waiting_is_no_action() -> None:
    plan = library("1f1b", 2, 4)
    events, ms = told(plan, 1.0, 0)
    waits = [TraceEvent(0, "wait", 0, 0, 0.0, 100.0)]
    assert (
        predict_from_steps(plan, [([*waits, *events], ms)]).step_ms == predict_from_steps(plan, [(events, ms)]).step_ms
    )


def test_what_workers_tell_is_read_as_they_wrote_it() -> None:
    said = [(1, marshal.dumps([("F", 0, 2, 1.0, 2.0)]))]
    assert decode_events(said) == ExecutedStep(None, worker_traces=said).trace == [TraceEvent(1, "F", 0, 2, 1.0, 2.0)]


def planned(schedule: SchedPlan) -> StepPlan:
    """Nothing but a schedule."""
    nothing: Any = None
    return StepPlan(nothing, nothing, nothing, nothing, schedule, "1f1b", 4, nothing, nothing, ())


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_plan_is_made_again_once_steps_have_lost_what_planning_takes(slower: float) -> None:
    """One of two workers takes longer than planned, or neither does."""
    plan = library("1f1b", 2, 4)
    ran = simulate(plan, spans=lambda block: block.span * (slower if block.stage else 1.0))
    said = [
        (plan.device(b)[0], marshal.dumps([(LETTERS[b.btype], b.stage, b.mid, *(float(at) / 1e3 for at in times))]))
        for b, times in ran.times.items()
    ]
    rehearsal, found = ScheduleTimings(), planned(plan)
    lost = (slower - 1) * 4 * 3 / 2  # half of what the slow one takes longer: four micro-batches of three units
    due = []
    for _ in range(40):
        rehearsal.add(found, ExecutedStep(None, worker_traces=said), float(ran.makespan), planning_ms=10 * lost)
        due.append(rehearsal.is_due)
    assert due.index(True) == 16 if slower > 1 else not any(due)  # looked at after 9 and 17 steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).tanh()


def test_a_program_is_told_what_its_steps_let_expect(tmp_path: Path) -> None:
    others = [one for one in gc.get_objects() if type(one) is ExecutedStep]  # of tests before this one
    model = Net()
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path), trace=True
    )
    GeminiCompiler().compiler(model, config)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    expected = []
    try:
        for step in range(15):
            model(torch.ones(8 if step not in {5, 7} else 6, 128)).sum().backward()
            for (kind,) in managed.pipelined.plans.kinds.values():
                assert kind.plan is not None
                plan = kind.timings.apply_to(kind.plan)
                expected.append(plan.step_ms)
                assert kind.plan.analysis.step_ms == plan.analysis.step_ms == expected[0]
        held = [one for one in gc.get_objects() if type(one) is ExecutedStep and not any(one is old for old in others)]
    finally:
        managed.pool.stop()
    ran = managed.pipelined.steps
    assert ran >= 10
    assert kind.timings.count == ran - 2  # two had other samples
    assert len(set(expected)) >= ran - 3  # by the profile first, then by all steps but the first
    assert plan.measured is not None
    assert plan.measured.steps == 8
    managed.pipelined.journal.refresh_plan()
    assert f"({expected[0]:.0f} by the profile alone)" in managed.pipelined.journal.plan
    assert managed.pipelined.plans.reported is kind.plan
    assert len(managed.pipelined.journal.traces) >= 2
    assert not held  # gradients would be, and outputs in the workers
