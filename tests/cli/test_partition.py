"""`gemini partition`: a table for people, JSON for programs, files for later, and errors that say what to do."""

from __future__ import annotations

import json

import pytest

from gemini.cli.main import main
from gemini.partition import Analysis, Partition

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
    return nn.Sequential(*(Layer() for _ in range(4))), (torch.randn(4, 8),)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command on a small model; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cut_models.py").write_text(SOURCE)

    def call(*arguments, analytic=True):
        given = ["partition", "cut_models.py:make", *(["--analytic", "cpu"] if analytic else []), *arguments]
        code = main(given)
        return code, *capsys.readouterr()

    return call


def test_a_table(run):
    code, text, error = run("--nparts", "2")
    assert (code, error) == (0, "")
    for part in ("forward", "scopes", "0 … 1", "balance 1.0", "speed-up", "exact"):
        assert part in text, text


def test_measured_and_from_a_saved_profile(run):
    code, text, _ = run("--nparts", "2", "--json", analytic=False)
    assert code == 0
    assert Analysis.from_json(json.loads(text)["analysis"]).nparts == 2
    assert main(["profile", "cut_models.py:make", "--analytic", "h100", "--save", "saved.json"]) == 0
    code, text, _ = run("--nparts", "2", "--profile", "saved.json", analytic=False)
    assert code == 0
    assert "times on h100" in text


def test_json_and_files(run, tmp_path):
    code, text, _ = run("--nparts", "2", "--json", "--output", "partition.json", "--draw", "cut.svg", "--fold", "1")
    assert code == 0
    found = json.loads(text)
    assert Partition.from_json(found["partition"]) == Partition.load("partition.json")
    assert Analysis.from_json(found["analysis"]).partitioner == "exact"
    assert {path.name for path in tmp_path.glob("cut*")} >= {"cut.svg", "cut.graph.svg"}


def test_compare(run):
    code, text, _ = run("--nparts", "2", "--compare")
    assert code == 0
    for name in ("exact", "mpipe", "acyclic", "multilevel", "÷ ideal", "speed-up"):
        assert name in text
    code, text, _ = run("--nparts", "2", "--compare", "--json", "--partitioner", "acyclic", "--output", "p.json")
    assert code == 0
    assert json.loads(text)["best"]
    assert Partition.load("p.json").partitioner == "acyclic"


def test_compare_where_nothing_can_be_cut_shows_why_and_fails(run):
    code, text, error = run("--nparts", "99", "--compare")
    assert code == 2
    assert "is the most" in text
    assert "no partitioner" in error


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--schedule", "gpipe", "--micro-batches", "4"], "schedule", "gpipe"),
        (["--schedule", "composed"], "schedule", "composed"),
        (["--micro-batches", "3"], "micro_batches", 3),
        (["--weight", "forward", "--ratio", "2"], "nparts", 2),
        (["--recompute", "--tied", "together", "--seed", "3", "--time-limit", "2"], "nparts", 2),
        (["--slack", "0", "--optimizer-copies", "1", "--no-mixed"], "nparts", 2),
        (["--latency", "0.01", "--bandwidth", "10"], "nparts", 2),
        (["--partitioner", "acyclic"], "partitioner", "acyclic"),
        (["--depth", "1"], "nparts", 2),
        (["--basic-block", "Layer"], "nparts", 2),
    ],
)
def test_options(run, arguments, key, value):
    code, text, error = run("--nparts", "2", "--json", *arguments)
    assert code == 0, error
    assert json.loads(text)["analysis"][key] == value


def test_workers(run):
    code, text, error = run("--nparts", "2", "--json", "--memory", "10,none", "--speed", "1,3")
    assert code == 0, error
    workers = json.loads(text)["analysis"]["workers"]
    assert [(worker["limit_mb"], worker["speed"]) for worker in workers] == [(10, 1), (None, 3)]
    assert workers[0]["load_ms"] == pytest.approx(workers[1]["load_ms"], rel=0.5)


def test_constraints(run):
    code, text, error = run("--nparts", "2", "--json", "--pin", "3=1", "--uncut", "1", "--together", "0,1")
    assert code == 0, error
    stages = json.loads(text)["analysis"]["stages"]
    last = max(node for stage in stages for node in stage["nodes"])
    assert next(stage["worker"] for stage in stages if last in stage["nodes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--nparts", "0"], "request 1 or more"),
        (["--nparts", "50"], "is the most"),
        (["--partitioner", "exat"], "did you mean 'exact'"),
        (["--schedule", "1f1"], "did you mean '1f1b'"),
        (["--memory", "1,2,3"], "3 entries for 2 workers"),
        (["--memory", "x"], "'x' is not a number"),
        (["--speed", "0"], "a number above 0"),
        (["--memory", "0.0000001"], "→"),
        (["--pin", "0"], "write a scope and a worker"),
        (["--pin", "nowhere=0"], "no scope 'nowhere'"),
        (["--pin", "0=7"], "part 7 of 2"),
        (["--pin", "0=0", "--pin", "0.a=1", "--together", "0,1"], "pins contradict"),
        (["--uncut", "nowhere"], "no scope 'nowhere'"),
        (["--micro-batches", "0"], "1 or more"),
        (["--draw", "cut.bmp"], "name a file ending in"),
        (["--output", "missing/partition.json"], "cannot write"),
        (["--profile", "missing.json"], "cannot be read"),
        (["--link", "missing.json"], "cannot be read"),
        (["--device", "cuda:77"], "devices present"),
        (["--depth", "0"], "depth=0"),
    ],
)
def test_mistakes(run, arguments, part):
    given = arguments if "--nparts" in arguments else ["--nparts", "2", *arguments]
    code, _, error = run(*given, analytic="--profile" not in arguments)
    assert code == 2
    assert part in error
    assert "Traceback" not in error


def test_several_mistakes_are_told_at_once(run):
    _, _, error = run("--nparts", "2", "--memory", "x", "--speed", "1,2,3", "--pin", "0")
    assert all(part in error for part in ("--memory 'x'", "--speed has 3 entries", "--pin '0'"))
