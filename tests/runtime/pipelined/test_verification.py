"""Verification: a step by a corrupted plan is rolled back and runs locally, and so do all later steps of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import WorkerError
from gemini.pipe import live_stages
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal

STEPS = 6
Pair = tuple[str, str]


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], drop: float) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.drop = norm(16), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.drop(self.norm(self.b(torch.tanh(self.a(x))))))


def make(norm: Callable[[int], nn.Module] = nn.LayerNorm, drop: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(norm, drop).double()


def manage(model: nn.Module, pool: WorkerPool, *, strict: bool = False, **options: Any) -> ManagedModel:
    managed = ManagedModel(model, pool, micro_batches=4, strict=strict)
    wish = PlanRequest(len(pool.workers), 4, cache=False, **options)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), ModelJournal("Net", 2)
    )
    dispatch.manage(model, managed)
    return managed


def corrupt(monkeypatch: pytest.MonkeyPatch, *pairs: Pair) -> None:
    """Change the source of the stages before it is compiled."""
    load = live_stages.load_module

    def load_corrupted(source: str, path: str) -> ModuleType:
        for old, new in pairs:
            source = source.replace(old, new)
        return load(source, path)

    monkeypatch.setattr(live_stages, "load_module", load_corrupted)


def train(model: nn.Module) -> list[Any]:
    """Train; return losses, outputs that the script reads, and at last weights, buffers and generator state."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(0, 4, (8,))
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.item(), out.detach().clone()]
    return [*seen, *model.state_dict().values(), torch.get_rng_state()]


def evaluate(model: nn.Module) -> list[Any]:
    torch.manual_seed(8)
    with torch.no_grad():
        return [model(torch.randn(8, 8, dtype=torch.float64)) for _ in range(STEPS)] + [torch.get_rng_state()]


def check_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


CORRUPTIONS: dict[str, tuple[Callable[[], Net], list[Pair], str]] = {
    "loss": (make, [("torch.tanh(", "1.001 * torch.tanh(")], "gradient"),
    "gradient": (
        make, [("torch.tanh(self.a(x))", "(lambda out: 2 * out - out.detach())(torch.tanh(self.a(x)))")],
        "the gradient of a.weight differs by 1.0e+00 of its norm and 1 more difference",
    ),
    "no gradient": (make, [("self.a(x)", "self.a(x).detach()")], "the gradient of a.weight is "),
    "buffer": (
        lambda: make(nn.BatchNorm1d), [("self.norm(", "self.norm(0 * self.norm.running_var.mul_(1.001) + ")],
        "buffer norm.running_var differs by",
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_plan_is_found_and_trains_as_one_process(
    name: str, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factory, pairs, text = CORRUPTIONS[name]
    reference = factory()
    model = copy.deepcopy(reference)
    expected = train(reference)
    corrupt(monkeypatch, *pairs)
    managed = manage(model, pool)
    found = train(model)
    check_equal(found, expected)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "is not equal to its rerun" in one]
    assert "Net runs in this process from now on: a step by its plan (2 stages on 2 workers" in line
    assert text in line
    assert managed.pipelined is not None
    journal = managed.pipelined.journal
    assert not journal.steps.get("overlapped", 0) + journal.steps.get("undivided", 0)
    assert sum(count for reason, count in journal.reasons.items() if "is not equal to its rerun" in reason)


def test_strict_raises(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    corrupt(monkeypatch, ("torch.tanh(", "1.001 * torch.tanh("))
    manage(model, pool, strict=True)
    with pytest.raises(WorkerError, match="is not equal to its rerun in this process"):
        train(model)
    with pytest.raises(WorkerError, match="is not equal to its rerun in this process"):
        train(model)


def test_a_corrupted_evaluation_is_found(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(drop=0.5)
    expected = evaluate(copy.deepcopy(model))
    corrupt(monkeypatch, ("torch.tanh(", "1.001 * torch.tanh("))
    managed = manage(model, pool)
    check_equal(evaluate(model), expected)
    assert "output 0 differs by" in capsys.readouterr().err
    assert managed.given_up


def test_evaluations_that_write_buffers_are_rolled_back(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(nn.BatchNorm1d)
    reference = copy.deepcopy(model)
    expected = evaluate(reference)
    corrupt(monkeypatch, ("torch.tanh(", "1.001 * torch.tanh("))
    managed = manage(model, pool)
    check_equal(evaluate(model), expected)
    check_equal([*model.state_dict().values()], [*reference.state_dict().values()])
    assert managed.given_up


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_sound_plans_are_compared_once(drop: float, pool: WorkerPool) -> None:
    reference = make(drop=drop)
    model = copy.deepcopy(reference)
    managed = manage(model, pool)
    check_equal(train(model), train(reference))
    assert managed.pipelined is not None
    assert managed.pipelined.verification.steps == 1
    assert "verified: 1 step compared with this process: the loss differs by" in str(managed.pipelined.journal)


def test_two_waiting_calls_of_a_corrupted_plan_both_run_locally(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: nn.Module) -> list[Any]:
        for _ in range(3):
            model.zero_grad()
            x = torch.ones(8, 8, dtype=torch.float64)
            one, two = model(x).square().mean(), model(2 * x).square().mean()
            one.backward()
            two.backward()
        return [one.detach(), two.detach(), *[p.grad for p in model.parameters()]]

    reference = make()
    model = copy.deepcopy(reference)
    corrupt(monkeypatch, ("torch.tanh(", "1.001 * torch.tanh("))
    managed = manage(model, pool)
    check_equal(step(model), step(reference))
    assert managed.given_up


def test_reruns_wait_until_there_is_time_for_them(pool: WorkerPool) -> None:
    model = make()
    managed = manage(model, pool)
    pipelined = managed.pipelined
    assert pipelined is not None
    x = torch.ones(8, 8, dtype=torch.float64)
    for _ in range(6):
        model(x).sum().backward()
        pipelined.plans.planning_ms = 0.0
    assert pipelined.journal.steps["overlapped"] > 1
    assert pipelined.verification.steps <= 1  # planning had paid for the first one
    other = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)  # another kind
    for _ in range(4):
        model(other).sum().backward()
        pipelined.plans.planning_ms = 0.0
    before = pipelined.verification.steps
    pipelined.plans.planning_ms = 1e9
    model(other).sum().backward()
    assert pipelined.verification.steps == before + 1


def test_workers_with_their_own_random_numbers_are_not_compared(pool: WorkerPool) -> None:
    model = make(drop=0.5)
    managed = manage(model, pool, rng="fast")
    train(model)
    assert managed.pipelined is not None
    assert not managed.given_up
    assert (
        'verified: no step compared with this process: the workers draw their own random numbers (rng="fast")'
        in str(managed.pipelined.journal)
    )
