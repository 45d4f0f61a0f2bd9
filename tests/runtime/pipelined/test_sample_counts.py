"""A step whose number of samples disagrees with its tensors is refused before it is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.ir.call_binding import bind
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.pipelined.step_request import WholeTensor, bind_inputs
from gemini.runtime.pool.worker_handle import InternalFault
from gemini.step.worker_program import program_of


def test_samples_that_nobody_would_see_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4)
    piped = plan_step(model, (x,), {}, PlanRequest(2, 3, cache=False)).build()
    bound, dims = bind(model, (x,), {}), {id(x): 0}
    (found,) = bind_inputs(piped.routes, piped.model, bound, dims, (2, 2, 2)).values()
    assert isinstance(found, WholeTensor)
    with pytest.raises(InternalFault, match="6 entries for 5 samples"):
        bind_inputs(piped.routes, piped.model, bound, dims, (2, 2, 1))


def test_a_backward_is_added_when_all_forwards_of_its_micro_batch_are_through() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)
    plan = plan_step(model, (x,), {}, PlanRequest(1, 2, cache=False, schedule="gpipe"))
    program = program_of(plan.build(), [["0F0", "0F1"]])
    assert [str(action) for action in program.with_backward(0).orders[0]] == ["0F0", "0B0", "0F1", "0B1"]
    assert program.with_backward(0).with_backward(0) == program.with_backward(0)
