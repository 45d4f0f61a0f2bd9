"""The mnist sample: it learns, it checks its checkpoint, and under gemini_python it prints the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
SAMPLES = Path(__file__).parents[2] / "samples"
SCRIPT = SAMPLES / "mnist" / "train.py"


def output(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_same_output_under_python_and_gemini_python(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--batch-size", "128", "--save"]
    plain = output(str(SCRIPT), *arguments, str(tmp_path / "net.pt"))
    ours = output("-m", "gemini.cli.python", str(SCRIPT), *arguments, str(tmp_path / "net.pt"))
    assert ours == plain
    assert plain.endswith("saved net.pt\n")


@pytest.mark.slow
def test_it_learns() -> None:
    said = output(str(SCRIPT))
    accuracies = [float(found) for found in re.findall(r"\(([\d.]+) %\)", said)]
    assert accuracies[0] < 50
    assert accuracies[-1] > 95


def test_the_sample_knows_nothing_of_gemini() -> None:
    assert "gemini" not in SCRIPT.read_text().lower()


@pytest.mark.parametrize("name", ["mnist", "dump_ast"])
def test_every_sample_says_what_it_is_in_one_line(name: str) -> None:
    lines = (SAMPLES / name / "README.md").read_text().splitlines()
    assert len(lines) == 5
    assert 20 < len(lines[0]) <= 120
