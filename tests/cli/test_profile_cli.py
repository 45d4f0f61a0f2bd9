"""`gemini profile`: a table for people, JSON for programs, and errors that say what to do."""

from __future__ import annotations

import json

import pytest

from gemini.cli.main import main
from gemini.profiling import Profile

SOURCE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

def make():
    return nn.Sequential(*(Layer() for _ in range(3))), (torch.randn(4, 8),)

def with_keywords():
    return nn.Linear(8, 8), (), {"input": torch.randn(4, 8)}

def keywords_only():
    return nn.Linear(8, 8), {"input": torch.randn(4, 8)}

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 8)), (torch.empty(4, 8),)

def nothing():
    return None

value = 3
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "profiled_models.py").write_text(SOURCE)
    return "profiled_models.py"


def test_a_table(source, capsys):
    assert main(["profile", f"{source}:make", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    for part in ("forward ms", "saved MB", "0.b  ×3", "1.a  ×2", "whole step", "12 nodes in 7 classes"):
        assert part in text, text


def test_json_is_a_profile(source, capsys):
    assert main(["profile", f"{source}:make", "--json", "--rounds", "1", "--save", "saved.json"]) == 0
    found = Profile.from_json(json.loads(capsys.readouterr().out))
    assert found == Profile.load("saved.json")
    assert [cost.name for cost in found][:2] == ["0.a", "0.relu"]


@pytest.mark.parametrize("function", ["with_keywords", "keywords_only", "on_meta"])
def test_what_a_function_may_return(source, function, capsys):
    assert main(["profile", f"{source}:{function}", "--json", "--analytic", "h100"]) == 0
    assert Profile.from_json(json.loads(capsys.readouterr().out)).mode == "analytic"


def test_granularity(source, capsys):
    assert main(["profile", f"{source}:make", "--basic-block", "Layer", "--json", "--analytic", "cpu"]) == 0
    assert [node["name"] for node in json.loads(capsys.readouterr().out)["nodes"]] == ["0", "1", "2"]
    assert main(["profile", f"{source}:make", "--depth", "1", "--json", "--analytic", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["nodes"]) == 3


def test_a_module_on_the_path(source, capsys, monkeypatch):
    assert main(["profile", "profiled_models:make", "--analytic", "a100"]) == 0
    assert "a100 (analytic)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no model to profile"),
        (["profiled_models.py"], "does not name a function"),
        (["profiled_models.py:"], "does not name a function"),
        (["missing.py:make"], "no file missing.py"),
        (["no_such_module_here:make"], "no module 'no_such_module_here'"),
        (["profiled_models.py:mak"], "did you mean 'make'?"),
        (["profiled_models.py:value"], "no function 'value'"),
        (["profiled_models.py:nothing"], "returned NoneType"),
        (["profiled_models.py:make", "--device", "cuda:77"], "devices present: cpu"),
        (["profiled_models.py:make", "--analytic", "h9000"], "unknown device description"),
        (["profiled_models.py:make", "--basic-block", "Layr"], "'Layr' does not occur"),
        (["profiled_models.py:make", "--depth", "0"], "depth=0"),
    ],
)
def test_mistakes(source, arguments, part, capsys):
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert "Traceback" not in error


def test_the_link(source, capsys):
    assert main(["profile", "--link", "--save", "link.json"]) == 0
    assert "bandwidth" in capsys.readouterr().out
