"""`gemini compile`: the program it writes prints what `gemini_python` prints, from the files in its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FORCED = ("--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "2")
LAYERS = """\
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).tanh()))
"""
SCRIPT = """\
# Trains a small model.
import sys

import torch
from torch import nn

from layers import Block

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(6, 16), *(Block(16) for _ in range(4)), nn.Linear(16, 3))  # the model
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name(words[0])
    return subprocess.run(
        [str(tool), *words[1:]],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script and its parallel program."""
    made = tmp_path_factory.mktemp("compiled")
    (made / "train.py").write_text(SCRIPT)
    (made / "layers.py").write_text(LAYERS)
    done = run("gemini", "compile", "train.py", "-o", "parallel", *FORCED, "--", "6", cwd=made)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "parallel: 2 source files, 2 stages, 1 plan",
        "run it with: python parallel/train.py 6",
    ]
    return made


def test_the_folder_is_complete(folder: Path) -> None:
    program = folder / "parallel"
    names = {path.relative_to(program).as_posix() for path in program.rglob("*") if path.is_file()}
    stages = {f"stages/Sequential/{name}" for name in ("stage_0.py", "stage_1.py", "plan.json", "partition.json")}
    assert {"train.py", "layers.py", "plan.json", "partition.json", "config.json", "README.md", *stages} <= names
    assert "python parallel/train.py 6" in (program / "README.md").read_text()
    settings = {"mode": "pipeline", "pipeline_degree": 2, "accum_degree": 2}
    assert json.loads((program / "config.json").read_text()) == settings
    text = (program / "train.py").read_text()
    assert "# Trains a small model.\n" in text
    assert "net = __gemini__.model(nn.Sequential(nn.Linear(6, 16), *" in text
    assert "nn.Linear(16, 3)))  # the model\n" in text


def test_it_prints_what_gemini_python_prints(folder: Path) -> None:
    expected = run("gemini_python", *FORCED, "train.py", "6", cwd=folder)
    done = run("python", "parallel/train.py", "6", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert "parallel, as compiled" in done.stderr
    assert "4 of 6 calls overlapped" in done.stderr
    assert "planned now" not in done.stderr
    assert "generated now" not in done.stderr


def test_a_check_finds_faults_of_stages_and_plans(folder: Path) -> None:
    done = run("gemini", "check", "parallel", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *["ok    Sequential"] * 3, "ok    Sequential/stage_0.py", "ok    Sequential/stage_1.py", "ok    Sequential"
    ]  # fmt: skip
    assert lines[-1].endswith("the 20 parameters and buffers of the model")
    home = folder / "parallel/stages/Sequential"
    stage, plan = (home / "stage_1.py").read_text(), (home / "plan.json").read_text()
    try:
        (home / "stage_1.py").write_text(stage.replace("        return ", "        return 1 and "))
        (home / "plan.json").write_text(plan.replace('"devices": [1]', '"devices": [0]'))
        static = run("gemini", "check", "--static", "parallel", cwd=folder)
        assert static.returncode == 1
        assert "FAULT Sequential: plan.json: exclusivity" in static.stdout
        assert "edited: Sequential/stage_1.py" in static.stdout
        (home / "stage_1.py").write_text(stage.replace("        return ", "        return (1, ").rstrip() + ")\n")
        done = run("gemini", "check", "parallel", cwd=folder)
        assert "FAULT Sequential/stage_1.py: " in done.stdout
    finally:
        (home / "stage_1.py").write_text(stage)
        (home / "plan.json").write_text(plan)


@pytest.mark.slow
def test_an_edited_stage_runs(folder: Path) -> None:
    stage = folder / "parallel/stages/Sequential/stage_1.py"
    before = stage.read_text()
    last = before.rpartition("        return ")
    stage.write_text(f"{last[0]}        print('in the edited stage')\n        return 2 * {last[2]}")
    try:
        expected = run("gemini_python", *FORCED, "train.py", "6", cwd=folder)
        done = run("gemini_python", "--verify", "parallel/train.py", "6", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "edited: Sequential/stage_1.py" in done.stderr
        assert "4 of 6 calls overlapped" in done.stderr
        assert "the edited Sequential/stage_1.py differ from the model" in done.stderr
        assert "in the edited stage" in done.stdout
        numbers = [line for line in done.stdout.splitlines() if line[0].isdigit()]
        assert len(numbers) == 6
        assert not set(numbers) & set(expected.stdout.splitlines())
        again = run("gemini", "compile", "train.py", "-o", "parallel", *FORCED, "--", "6", cwd=folder)
        assert again.returncode == 2
        assert "parallel is not replaced: it was edited\n  - Sequential/stage_1.py was edited" in again.stderr
    finally:
        stage.write_text(before)


@pytest.mark.parametrize(
    ("text", "replacement", "fault"),
    [
        ("        return ", "        undefined()\n        return ", "NameError: name 'undefined' is not defined"),
        pytest.param("class Stage0", "class (", "cannot be executed: SyntaxError", marks=pytest.mark.slow),
        pytest.param("class Stage0", "class Other", "defines no module Stage0", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_an_edited_stage_is_raised(folder: Path, text: str, replacement: str, fault: str) -> None:
    stage = folder / "parallel/stages/Sequential/stage_0.py"
    before = stage.read_text()
    stage.write_text(before.replace(text, replacement))
    try:
        done = run("python", "parallel/train.py", "6", cwd=folder)
        assert done.returncode == 1
        assert "stages/Sequential/stage_0.py" in done.stderr
        assert fault in done.stderr
    finally:
        stage.write_text(before)


def test_files_that_belong_together_must_not_change(folder: Path) -> None:
    partition = folder / "parallel/stages/Sequential/partition.json"
    before = partition.read_text()
    partition.write_text(before.replace('"exact"', '"mine"'))
    try:
        done = run("python", "parallel/train.py", "6", cwd=folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert "parallel/stages/Sequential has changed since it was compiled" in done.stderr
        assert "partition.json was edited" in done.stderr
    finally:
        partition.write_text(before)


def test_a_program_without_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing to train')\n")
    done = run("gemini", "compile", "train.py", "-o", "parallel", cwd=tmp_path)
    assert done.returncode == 2
    assert "no model of train.py has run by a plan: it trains no model" in done.stderr
    assert not (tmp_path / "parallel").exists()
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    done = run("gemini", "compile", "train.py", "-o", "parallel", cwd=tmp_path)
    assert "the program ended with exit code 3" in done.stderr


@pytest.mark.slow
def test_stages_of_several_shards_are_compiled_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("*(Block(16) for _ in range(4))", "nn.Tanh()"))
    (tmp_path / "layers.py").write_text(LAYERS)
    hybrid = ("--mode", "hybrid", "--sharding-size", "2", "--pipeline-degree", "2", "--accum-degree", "2")
    done = run("gemini", "compile", "train.py", "-o", "parallel", *hybrid, "--", "6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Partial()" in "".join(path.read_text() for path in tmp_path.glob("parallel/stages/*/stage_*.py"))
    expected = run("gemini_python", *hybrid, "train.py", "6", cwd=tmp_path)
    done = run("python", "parallel/train.py", "6", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert "4 of 6 calls overlapped" in done.stderr
    assert "generated now" not in done.stderr
    checked = run("gemini", "check", "parallel", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "the code of each of 2 shards" in checked.stdout
