"""Every sample is an ordinary script, says what it is, and ends with the losses of two workers and of one device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2] / "samples"
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/README.md"))
QUICK = {
    "bert": ("--size", "tiny", "--steps", "6", "--batch-size", "8", "--length", "32"),
    "bert_tf": ("--size", "tiny", "--steps", "6", "--batch-size", "8", "--length", "16"),
    "gan": ("--steps", "6", "--batch-size", "16", "--width", "8"),
    "gpt": ("--steps", "6", "--batch-size", "8", "--context", "16", "--width", "32", "--depth", "2"),
    "lstm_lm": ("--epochs", "1", "--length", "64"),
    "mnist": ("--epochs", "1", "--batch-size", "128"),
    "mnist_tf": ("--steps", "11", "--width", "4", "--batch-size", "16"),
    "seq2seq": ("--steps", "6", "--batch-size", "8", "--width", "16"),
}
NEEDED = {
    "bert": "transformers",
    "bert_tf": "tensorflow",
    "mnist_tf": "tensorflow",
    "gan": "sklearn",
    "mnist": "sklearn",
}


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_here() -> None:
    assert NAMES == ["bert", "bert_tf", "dump_ast", "gan", "gpt", "lstm_lm", "mnist", "mnist_tf", "seq2seq"]


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is_in_five_lines(name: str) -> None:
    lines = (SAMPLES / name / "README.md").read_text().splitlines()
    assert len(lines) == 5
    assert 20 < len(lines[0]) <= 125


@pytest.mark.parametrize("name", sorted(QUICK))
def test_its_scripts_know_nothing_of_gemini(name: str) -> None:
    for script in (SAMPLES / name).glob("*.py"):
        assert "gemini" not in script.read_text().lower(), script


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "lstm_lm" else pytest.mark.slow) for name in QUICK]
)
def test_two_workers_end_with_the_loss_of_one_device(name: str, tmp_path: Path) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    said = run(SAMPLES / "compare.py", SAMPLES / name / "train.py", *QUICK[name], folder=tmp_path)
    found = re.search(r"^last loss: ([\d.]+) in workers, ([\d.]+) on one device, difference \S+$", said, re.MULTILINE)
    assert found, said
    assert abs(float(found[1]) - float(found[2])) <= 1e-4 * float(found[2])


def test_the_text_is_what_the_grammar_writes() -> None:
    place = importlib.util.spec_from_file_location("make_text", SAMPLES / "gpt" / "make_text.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    assert module.make() == (SAMPLES / "gpt" / "text.txt").read_text()


@pytest.mark.slow
def test_gpt_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    small = QUICK["gpt"][2:]
    script = SAMPLES / "gpt" / "train.py"
    whole = run(script, "--steps", "8", *small, folder=tmp_path)
    run(script, "--steps", "4", *small, "--save", "gpt.pt", folder=tmp_path)
    rest = run(script, "--steps", "8", *small, "--resume", "gpt.pt", folder=tmp_path)
    assert rest.splitlines()[0] == "resumed at step 4"
    ends = [[line for line in text.splitlines() if "ms per step" not in line][-3:] for text in (rest, whole)]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_bert_with_the_trainer(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    said = run(SAMPLES / "bert" / "trainer.py", *QUICK["bert"], folder=tmp_path)
    assert re.search(r"^loss \d", said, re.MULTILINE)
