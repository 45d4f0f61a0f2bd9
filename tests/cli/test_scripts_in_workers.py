"""`gemini_python` trains an unmodified script in workers: the same output, a summary on standard error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gemini.runtime.call_outcome import FallbackReason

COMMAND = str(Path(sys.executable).with_name("gemini_python"))
FORCED = ("--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "2")
SCRIPT = """\
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.4f} {random.random():.6f}")
"""


def begin(command: str, *words: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache"), "COLUMNS": "120"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([command, *words], cwd=cwd, env=environment, text=True, **streams)


def run(command: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [command, *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_forced_pipeline_prints_what_python_prints(folder: Path) -> None:
    expected = run(sys.executable, "train.py", cwd=folder)
    done = run(COMMAND, *FORCED, "--verify", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert "Sequential, 435 parameters, trained by SGD" in done.stderr
    assert "3 steps compared with this process" in done.stderr
    assert "is not equal" not in done.stderr
    assert re.fullmatch(
        r"gemini: Sequential: 4 of 6 calls overlapped, [\d.]+ m?s per step \([\d.]+ m?s in this process: [\d.]+ ×\); "
        r"gemini explain shows more",
        done.stderr.splitlines()[-1],
    )
    explained = run(COMMAND.replace("gemini_python", "gemini"), "explain", cwd=folder)
    assert "4 overlapped" in explained.stdout


CORRUPT = """
from types import ModuleType
from gemini.pipe import live_stages

load = live_stages.load_module
def load_corrupted(source: str, path: str) -> ModuleType:
    return load(source.replace("return ", "return 1.01 * ", 1), path)
live_stages.load_module = load_corrupted
"""


def test_a_corrupted_plan_is_found_before_it_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # planning pays for the comparison
    expected = run(sys.executable, "train.py", cwd=folder)
    (folder / "train.py").write_text(CORRUPT + SCRIPT)
    done = run(COMMAND, *FORCED, "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert "Sequential runs in this process from now on: a step by its plan (2 stages on 2 workers" in done.stderr
    assert "is not equal to its rerun in this process: the gradient of " in done.stderr
    explained = run(COMMAND.replace("gemini_python", "gemini"), "explain", cwd=folder)
    assert "overlapped" not in explained.stdout.partition("plan:")[0]
    assert "is not equal to its rerun" in explained.stdout


@pytest.mark.slow
def test_strict_ends_the_run_at_a_corrupted_plan(folder: Path) -> None:
    (folder / "train.py").write_text(CORRUPT + SCRIPT)
    done = run(COMMAND, *FORCED, "--verify", "--strict", "train.py", cwd=folder)
    assert done.returncode == 1
    assert "WorkerError: Sequential cannot run in its workers any more: a step by its plan" in done.stderr
    assert "without strict=True" in done.stderr


TYPES = """
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    out = net(x)
    table = {torch.Tensor: "tensor", tuple: "pair"}
    match type(out):
        case torch.Tensor:
            kind = "matched"
    print(type(out) is torch.Tensor, type(out) is not type(net), type(out) == torch.Tensor, type(out) in [torch.Tensor])
    print(out.__class__ is torch.Tensor, table[type(out)], table.get(type(out)), table[out.__class__], kind)
    print(type(out), type(out).__name__, issubclass(type(out), torch.Tensor), type(out)([1.0, 2.0]))
    nn.functional.cross_entropy(out, y).backward()
"""


@pytest.mark.slow
def test_the_types_of_deferred_tensors_are_those_of_python(folder: Path) -> None:
    steps, _, _ = SCRIPT.rpartition("    print(")
    (folder / "train.py").write_text(steps + TYPES)
    expected = run(sys.executable, "train.py", cwd=folder)
    done = run(COMMAND, *FORCED, "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert "True True True True" in done.stdout
    explained = run(COMMAND.replace("gemini_python", "gemini"), "explain", cwd=folder)
    assert "10 overlapped" in explained.stdout


@pytest.mark.slow
def test_a_script_in_which_nothing_overlaps_says_so_once(folder: Path) -> None:
    """And no speed-up is promised: no plan is shown."""
    text = SCRIPT.replace("    loss = ", "    out = net(x)\n    torch.rand(())\n    loss = ").replace(
        "(net(x), y)", "(out, y)"
    )
    (folder / "train.py").write_text(text)
    expected = run(sys.executable, "train.py", cwd=folder)
    done = run(COMMAND, *FORCED, "--run-folder", "runs", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "s so far" not in line)  # progress on a busy machine
    assert line == (
        f"gemini: Sequential: none of 6 calls overlapped (6 in this process): {FallbackReason.DRAWN_EARLY}; "
        "gemini explain --run-folder runs shows more"
    )
    assert run(COMMAND, *FORCED, "-q", "train.py", cwd=folder).stderr == ""


def test_auto_leaves_a_small_model_alone_with_one_line(folder: Path) -> None:
    expected = run(sys.executable, "train.py", cwd=folder)
    done = run(COMMAND, "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("gemini: Sequential runs as under python: a step of ")
    assert (
        "is too short for workers to speed up"
        in run(COMMAND.replace("gemini_python", "gemini"), "explain", cwd=folder).stdout
    )


def test_a_dry_run_plans_and_trains_nothing(folder: Path) -> None:
    done = run(COMMAND, *FORCED, "--dry-run", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "on 2 workers" in done.stderr


def test_a_program_that_trains_nothing_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "eval.py").write_text("import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    done = run(COMMAND, "eval.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 2])\n")
    assert done.stderr == "gemini: no model was trained: the program ran as under python\n"
    assert run(COMMAND, "-q", "eval.py", cwd=tmp_path).stderr == ""


@pytest.mark.slow
def test_a_program_that_trains_single_layers_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)\n"
        "two(one(torch.ones(1, 2)).relu()).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = run(COMMAND, "train.py", cwd=tmp_path)
    assert done.stderr == (
        "gemini: only single layers were trained, called directly: the program ran as under python\n"
    )


@pytest.mark.slow
def test_runs_that_share_a_folder_and_later_ones_that_find_their_plan(folder: Path) -> None:
    expected = run(sys.executable, "train.py", cwd=folder)
    both = [begin(COMMAND, *FORCED, "train.py", cwd=folder) for _ in range(2)]
    for one in both:
        stdout, stderr = one.communicate(timeout=200)
        assert (one.returncode, stdout) == (0, expected.stdout), stderr
        assert "plan is not used" not in stderr
    _, later = begin(COMMAND, *FORCED, "--dry-run", "train.py", cwd=folder).communicate(timeout=200)
    assert "plan from cache" in later
    assert len(list((folder / ".gemini").glob("explain-*.json"))) == 2


def test_a_plan_that_cannot_run_is_an_error_before_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('began')\n")
    ran = subprocess.run(
        [COMMAND, *FORCED, "--schedule", "none.json", "train.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("gemini_python: cannot read none.json: No such file or directory\n    → ")


@pytest.mark.slow
def test_workers_do_not_complain_of_their_sockets(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [COMMAND, *FORCED, "-W", "always", "train.py"], check=False, cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0
    assert "ResourceWarning" not in ran.stderr, ran.stderr
