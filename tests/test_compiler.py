"""The compiler returns the model itself, and it trains as it would without."""

import copy

import pytest
import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig, pipeline
from gemini.errors import ConfigError, InvalidPlanError
from gemini.runtime.interception import dispatch
from gemini.schedule.library import library


def losses(model: nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_same_object_and_same_numbers():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    reference = copy.deepcopy(model)
    managed = GeminiCompiler().compiler(model, config=GeminiConfig(mode=pipeline, pipeline_degree=2))
    assert managed is model
    assert losses(managed) == losses(reference)


def test_says_where_the_model_runs_unless_quiet(capsys):
    GeminiCompiler().compiler(nn.Linear(2, 2), config=GeminiConfig())
    assert "Linear runs in this process: the configuration requests no workers" in capsys.readouterr().err
    GeminiCompiler().compiler(nn.Linear(2, 2), config=GeminiConfig(quiet=True))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("model", "config"), [(object(), None), (nn.Linear(1, 1), {"mode": "pipeline"})])
def test_wrong_arguments_are_named(model, config):
    with pytest.raises(ConfigError, match=r"not (object|dict)"):
        GeminiCompiler().compiler(model, config=config)


@pytest.mark.parametrize(("workers", "text"), [(3, "is a plan for 2 workers, there are 3"), (2, "a step has 2")])
def test_a_plan_that_cannot_run_is_an_error_before_a_worker_starts(tmp_path, workers, text):
    path = library("1f1b", 2, 4).save(tmp_path / "plan.json")
    config = GeminiConfig(mode=pipeline, pipeline_degree=workers, accum_degree=2, schedule=path)
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidPlanError, match=text):
        GeminiCompiler().compiler(model, config=config)
    assert dispatch.find_managed(model) is None
