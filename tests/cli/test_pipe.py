"""`gemini pipe`: from a function in a file to a folder of stages."""

from __future__ import annotations

import json

import pytest

from gemini.cli.main import main

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(16, 3)), (torch.randn(8, 16),)

def broken():
    raise RuntimeError("the user's own")

def not_a_model():
    return 3
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(MODEL)
    return "my_models.py:make"


def test_writes_checks_and_tells(target, tmp_path, capsys):
    assert (
        main(["pipe", target, "--nparts", "2", "--analytic", "cpu", "--output", "stages", "--check", "--no-mixed"]) == 0
    )
    shown = capsys.readouterr().out
    assert "check: the sequential and the detached run equal the model exactly" in shown
    assert "stages: 2 stages" in shown
    assert {path.name for path in (tmp_path / "stages").iterdir()} == {
        "manifest.json", "graph.json", "partition.json", "profile.json", "stage_0.py", "stage_1.py",
    }  # fmt: skip


def test_measured_with_a_cache(target, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert main(["pipe", target, "--nparts", "2", "--rounds", "1", "--output", "stages"]) == 0
    assert capsys.readouterr().out


def test_json(target, capsys):
    assert main(["pipe", target, "--nparts", "2", "--analytic", "cpu", "--check", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["partition"]["nparts"] == 2
    assert data["check"]["right"] is True
    assert data["check"]["sequential"]["gradients"] == 0


def test_options_of_the_partition(target, tmp_path, capsys):
    arguments = ["--nparts", "2", "--analytic", "cpu", "--pin", "0=1", "--pin", "18=0", "--output", "stages"]
    assert main(["pipe", target, *arguments]) == 0
    manifest = json.loads((tmp_path / "stages" / "manifest.json").read_text())
    homes = {name: stage["worker"] for stage in manifest["stages"] for name in stage["parameters"]}
    assert homes["0.weight"] == 1
    assert homes["18.weight"] == 0
    assert main(["pipe", target, "--pin", "nothing=0", "--output", "stages"]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nparts", "2"], "--output DIR"),
        (["--nparts", "0", "--output", "stages"], "0 parts"),
        (["--nparts", "99", "--output", "stages", "--analytic", "cpu"], "is the most"),
        (["--partitioner", "magic", "--output", "stages"], "exact"),
        (["--analytic", "h1000", "--output", "stages"], "h100"),
        (["--output", "my_models.py"], "is a file"),
        (["--output", "stages", "--depth", "0"], "depth"),
        (["--output", "stages", "--basic-block", "Transformer"], "does not occur"),
        (["--output", "stages", "--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_message(target, capsys, arguments, text):
    assert main(["pipe", target, *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_an_edited_folder_needs_overwrite(target, tmp_path, capsys):
    arguments = ["pipe", target, "--nparts", "2", "--analytic", "cpu", "--output", "stages"]
    assert main(arguments) == 0
    (tmp_path / "stages" / "stage_0.py").write_text("# mine")
    assert main(arguments) == 2
    assert "stage_0.py was edited" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


def test_a_function_that_makes_no_model(target, capsys):
    assert main(["pipe", "my_models.py:not_a_model", "--output", "stages"]) == 2
    assert "returned int" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="the user's own"):
        main(["pipe", "my_models.py:broken", "--output", "stages"])


def test_help(capsys):
    assert main(["pipe", "--help"]) == 0
    assert "--check" in capsys.readouterr().out
