"""The mnist sample: it learns, and it checks its checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
SCRIPT = Path(__file__).parents[2] / "samples" / "mnist" / "train.py"


def output(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_same_output_under_python_and_gemini_python(tmp_path: Path) -> None:
    arguments = ["--epochs", "1", "--batch-size", "128", "--save"]
    plain = output(str(SCRIPT), *arguments, str(tmp_path / "net.pt"))
    ours = output("-m", "gemini.cli.python", str(SCRIPT), *arguments, str(tmp_path / "net.pt"))
    assert untimed(ours) == untimed(plain)
    assert plain.endswith("saved net.pt\n")


def untimed(text: str) -> str:
    """The output without the time per step."""
    return re.sub(r"[\d.]+ ms per step", "", text)


@pytest.mark.slow
def test_it_learns() -> None:
    said = output(str(SCRIPT))
    accuracies = [float(found) for found in re.findall(r"\(([\d.]+) %\)", said)]
    assert accuracies[0] < 50
    assert accuracies[-1] > 95
