"""Stages without shared memory equal a model that writes in place, for every cut."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.capture import capture
from gemini.ir.graph import Graph
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.profiling import profile
from tests.partition.staged_run import run_in_stages
from tests.partition.writing_models import CASES


@cache
def built(name: str) -> tuple[Graph, Problem, torch.Tensor]:
    torch.manual_seed(0)
    make, make_batch = CASES[name]
    model, x = make(), make_batch()
    graph = capture(model, (x.clone(),))
    return graph, build_problem(graph, profile(graph, analytic="cpu", check=False), 2, Options()), x


def tensors_after(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_stages_equal_the_model(name: str, data: st.DataObject) -> None:
    graph, problem, x = built(name)
    stage_of: list[int] = []
    for item in range(len(problem.items)):
        first = max((stage_of[one] for one in problem.predecessors[item]), default=0)
        stage_of.append(min(first + data.draw(st.sampled_from((0, 0, 0, 1, 2))), 5))
    used = sorted(set(stage_of))
    stages = [
        [node for item, stage in zip(problem.items, stage_of, strict=True) if stage == one for node in item.nodes]
        for one in used
    ]
    model = copy.deepcopy(graph.bound_model())
    torch.manual_seed(1)
    expected = model(x.clone())
    torch.manual_seed(1)
    found, ran = run_in_stages(graph, stages, (x.clone(),), {})
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    _compare_gradients(model, [stage.model for stage in ran])
    _compare_state(graph.bound_model(), model, [stage.model for stage in ran])


def _compare_gradients(model: torch.nn.Module, copies: list[torch.nn.Module]) -> None:
    for name, parameter in model.named_parameters():
        grads = [dict(one.named_parameters())[name].grad for one in copies]
        total: Any = sum((grad for grad in grads if grad is not None), torch.zeros_like(parameter))
        torch.testing.assert_close(
            total, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, rtol=1e-4, atol=1e-5
        )


def _compare_state(before: torch.nn.Module, model: torch.nn.Module, copies: list[torch.nn.Module]) -> None:
    """What a stage changed is as the model has it, and nothing that the model changes is left out."""
    start, end = tensors_after(before), tensors_after(model)
    for name in start:
        changed = [after for one in copies if not torch.equal(after := tensors_after(one)[name], start[name])]
        assert all(torch.allclose(after, end[name]) for after in changed), name
        assert bool(changed) == (not torch.equal(start[name], end[name])), name


def test_residual_networks_stay_fine_grained() -> None:
    graph, problem, _ = built("residuals")
    names = [{graph.nodes[node].name for node in item.nodes} for item in problem.items]
    assert max(len(item) for item in names) == 3  # the second norm, the addition and the activation behind it
    assert len(problem.items) >= 14


def test_readers_of_what_was_written_may_live_elsewhere() -> None:
    graph, problem, _ = built("first in place")
    names = [{graph.nodes[node].name for node in item.nodes} for item in problem.items]
    assert [item for item in names if len(item) > 1] == [{"mul", "relu"}]


def test_what_nobody_writes_is_separable() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    graph = capture(model, (torch.randn(2, 4),))
    problem = build_problem(graph, profile(graph, analytic="cpu", check=False), 2, Options())
    assert len(problem.items) == 5
