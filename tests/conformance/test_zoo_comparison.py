"""The zoo comparison tolerates rounding of sums and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.zoo import pipe_checks as piping
from conformance.zoo.comparison import Seen, differences, step
from conformance.zoo.pipe_checks import Cut, judge_cuts
from gemini.capture import capture
from gemini.ir.call_binding import ModelCall


class Tied(torch.nn.Module):
    """One weight with many readers: cut, its gradient is summed in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(16, 16)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, x * 2
        for norm in self.norms:
            left, right = torch.tanh(norm(self.shared(left))) + x, torch.dropout(self.shared(right), 0.1, True)
        return left * right


def seen(**changes: object) -> Seen:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(8, 16)
    return replace(step(model, ModelCall((x,), {}), 3, lambda a, k: model(*a, **k)), **changes)  # type: ignore[arg-type]


def test_the_same_step_shows_the_same():
    assert differences(seen(), seen()) == []


def test_a_step_leaves_everything_as_it_was():
    model, x = Tied(), torch.randn(8, 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step(model, ModelCall((x,), {}), 3, lambda a, k: model(*a, **k))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "limit", "passes"),
    [(0.0, 0.0, True), (1e-12, 0.0, False), (1e-12, 1e-9, True), (1e-8, 1e-9, False), (float("nan"), 1.0, False)],
)
def test_gradients_are_relative_to_the_largest_of_the_model(size, limit, passes):
    one = {"large": torch.tensor([100.0, 1.0], dtype=torch.float64), "none": torch.zeros(2, dtype=torch.float64)}
    other = {**one, "none": one["none"] + 100.0 * size}
    assert (differences(seen(gradients=one), seen(gradients=other), limit) == []) is passes


def test_outputs_are_relative_to_themselves():
    one = {"a": torch.tensor([100.0], dtype=torch.float64), "b": torch.tensor([1e-3], dtype=torch.float64)}
    other = {**one, "b": one["b"] + 1e-9}
    assert differences(seen(outputs=one), seen(outputs=one), 1e-9) == []
    assert len(differences(seen(outputs=one), seen(outputs=other), 1e-9)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"structure": "tuple(T)"},
        {"generators": ()},
        {"gradients": {}},
        {"buffers": {"n": torch.tensor(3)}},
        {"outputs": {"()": torch.zeros(8, 16, dtype=torch.float16)}},
        {"outputs": {}},
    ],
    ids=str,
)
def test_no_limit_excuses_what_is_not_rounding(changes):
    assert differences(seen(), seen(**changes), 1e9) != []


def test_sums_in_another_order_are_judged_in_float64():
    model, x = Tied(), torch.randn(8, 16)
    graph = capture(model, (x,), {})
    cuts = judge_cuts(graph, model, (x,), {})
    assert {cut[0] for cut in cuts.values()} <= {"equal", "no engine"}
    assert {cut[3] for cut in cuts.values()} <= {"float32", "float64", ""}


@pytest.mark.parametrize("factor", [1 + 1e-7, 1.5])
def test_a_wrong_gradient_is_found_however_small(factor, monkeypatch):
    model, x = Tied(), torch.randn(8, 16)
    graph = capture(model, (x,), {})
    whole = piping.Judge.piped

    def spoiled(self: piping.Judge, cut: object) -> object:
        piped = whole(self, cut)  # type: ignore[arg-type]
        run = piped.routes.run

        def wrong(*given: object) -> object:
            output = run(*given)  # type: ignore[arg-type]
            output.register_hook(lambda gradient: gradient * factor)
            return output

        piped.routes.run = wrong  # type: ignore[method-assign,assignment]
        return piped

    monkeypatch.setattr(piping.Judge, "piped", spoiled)
    cuts = judge_cuts(graph, model, (x,), {})
    assert {cut[0] for cut in cuts.values()} <= {"different", "no engine"}
    assert all("in sequence: gradient" in cut[2] for cut in cuts.values() if cut[0] == "different")


def test_a_model_without_float64_says_how_it_was_judged(monkeypatch):
    model, x = Tied(), torch.randn(8, 16)
    graph = capture(model, (x,), {})

    def refuse(_: piping.Judge) -> piping.Judge:
        raise RuntimeError("not implemented for 'Double'")

    monkeypatch.setattr(piping, "_widened", refuse)
    monkeypatch.setattr(piping, "_in_float32", lambda *_: Cut("unsure", 2, "", "float32 to 1e-04"))
    cuts = judge_cuts(graph, model, (x,), {})
    assert {(cut[0], cut[3]) for cut in cuts.values()} <= {("equal", "float32 to 1e-04"), ("no engine", "")}
