"""Costs in workers include large weights and the loss of large outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.planner import worker_costs
from gemini.planner.contention import Contention
from gemini.planner.plan_request import PlanRequest
from gemini.planner.worker_costs import estimate_worker_costs
from gemini.profiling import profile


class Words(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.inner, self.out = nn.Embedding(words, 32), nn.Linear(32, 32), nn.Linear(32, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.table(ids)))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_costs, "measure_contention", lambda *_: Contention())


def costs_of(model: nn.Module, batch: torch.Tensor) -> tuple[dict[str, float], dict[str, float]]:
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    changed = estimate_worker_costs(costs, graph, PlanRequest(2, 2))
    return {node.name: node.ms for node in costs}, {node.name: node.ms for node in changed}


def test_a_table_of_words_costs_its_rows_and_outputs_cost_their_loss() -> None:
    before, after = costs_of(Words(65536), torch.randint(65536, (2, 8)))
    assert after["table"] < before["table"]
    assert before["inner"] < after["inner"]  # functions in Python around its kernels
    assert after["out"] != before["out"]


def test_other_modules_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.LayerNorm(16))
    before, after = costs_of(model, torch.randn(2, 16))
    assert before == after


def test_frozen_weights_are_left_as_they_are() -> None:
    model = Words(16384)
    model.table.requires_grad_(False)
    before, after = costs_of(model, torch.randint(16384, (2, 64)))
    assert after["table"] == before["table"]


def test_the_generator_and_the_model_are_left_as_they_were() -> None:
    model, batch = Words(16384), torch.randint(16384, (2, 64))
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    weights, state = [one.detach().clone() for one in model.parameters()], torch.get_rng_state()
    estimate_worker_costs(costs, graph, PlanRequest(2, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), weights, strict=True))
    assert all(one.grad is None for one in model.parameters())
