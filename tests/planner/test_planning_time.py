"""Planning time: calls of modules are counted; a long planning is logged, or refused for short steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims
from gemini.planner.plan_request import PlanRequest
from gemini.planner.planning_time import CallCount, check_planning_time
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step
from tests.codegen.repeated_steps import CellLoop

MODEL = nn.Linear(2, 2)


def test_calls_of_inner_modules_are_counted_per_run() -> None:
    model = CellLoop()
    with CallCount(model).count() as calls:
        find_batch_dims(model, (torch.randn(4, 7),), {})
    assert calls.per_run == 14
    model(torch.randn(4, 7))
    assert calls.per_run == 14


def test_a_long_planning_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    check_planning_time(MODEL, 1000, PlanRequest(workers=2, micro_batches=4))
    assert capsys.readouterr().err == "gemini: planning Linear: about 6 s for 1000 calls of modules\n"


@pytest.mark.parametrize(("calls", "quiet"), [(10, False), (1000, True)])
def test_nothing_is_logged_for_a_short_planning_or_quietly(
    calls: int, quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check_planning_time(MODEL, calls, PlanRequest(workers=2, micro_batches=4, quiet=quiet))
    assert not capsys.readouterr().err


def test_a_planning_of_many_steps_is_refused_where_the_local_step_was_measured() -> None:
    model, x = CellLoop(), torch.randn(4, 200)
    request = PlanRequest(workers=2, micro_batches=2, local_step_ms=1.0, cache=False)
    with pytest.raises(UnplannableError, match=r"about 2 s for 400 calls of modules, longer than 200 steps of 1 ms"):
        plan_step(model, (x,), {}, request)
    check_planning_time(model, 400, PlanRequest(workers=2, micro_batches=2, local_step_ms=100.0))
