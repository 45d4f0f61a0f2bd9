"""However a program exits, no worker process and no shared memory remains."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("exiting_program.py")
ROOT = PROGRAM.parents[3]
MARK = "GEMINI_TEST_MARK"
WAYS = ["return", "exception", "sys.exit", "os._exit", "SIGINT", "SIGINT*2", "SIGTERM", "SIGHUP", "SIGKILL", "SIGQUIT"]
CODES = {
    "return": 0,
    "exception": 1,
    "sys.exit": 3,
    "os._exit": 4,
    "SIGTERM": -15,
    "SIGHUP": -1,
    "SIGKILL": -9,
    "worker": 5,
}


def marked(mark: str, only_workers: bool = False) -> list[int]:
    """Living processes that were started, directly or not, with a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and (not only_workers or b"gemini.runtime.worker" in command):
            found.append(int(folder.name))
    return found


def wait_until_gone(mark: str, seconds: float, only_workers: bool = False) -> list[int]:
    ends = time.monotonic() + seconds
    while (left := marked(mark, only_workers)) and time.monotonic() < ends:
        time.sleep(0.02)
    return left


def run(way: str, point: str, **environment: str) -> tuple[int, str, str, str]:
    """Run the program until it ends and nobody holds its output any more."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.Popen(
            [sys.executable, str(PROGRAM), way, point],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = made.communicate(timeout=120)
        finally:
            made.kill()
            for pid in wait_until_gone(mark, 0.0) if made.returncode is None else []:
                os.kill(pid, 9)
    return made.returncode, out, err, mark


def ends_cleanly(way: str, point: str, **environment: str) -> None:
    before = {name for name in os.listdir("/dev/shm") if "gemini" in name}
    code, out, err, mark = run(way, point, **environment)
    assert wait_until_gone(mark, 5.0) == [], f"{way} at {point}: left behind\n{err[-2000:]}"
    assert {name for name in os.listdir("/dev/shm") if "gemini" in name} <= before
    if way in CODES:
        assert code == CODES[way], f"{way} at {point}: {code}\n{err[-2000:]}"
    else:
        assert code != 0
    if way == "exception":
        assert "ValueError: the end" in err
    if way == "worker":
        names_the_worker(out)
    if environment.get("ENDINGS_PLAN") and point.startswith("+"):
        assert "training" in out, err[-2000:]
        assert "'overlapped'" in out, out


def names_the_worker(out: str) -> None:
    """The program's own output says when it killed which worker, and when it had which error."""
    said = [line for line in out.splitlines() if line.startswith(("killed", "lost"))]
    assert [line.split()[0] for line in said] == ["killed", "lost"], out
    killed, lost = said
    _, pid, began = killed.split()
    _, ended, text = lost.split(" ", 2)
    assert f"(process {pid}) was killed by SIGKILL" in text, text
    assert "its last action: " in text
    assert float(ended) - float(began) < 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way",
    [
        "sys.exit", "SIGINT*2",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("exception", "os._exit", "SIGTERM", "SIGKILL")),
    ],
)  # fmt: skip
def test_nothing_is_left_after_training(way: str) -> None:
    ends_cleanly(way, f"+{random.Random(way).uniform(0, 0.2):.3f}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["SIGINT*2", "SIGTERM", "worker", "SIGKILL"])
def test_nothing_is_left_when_it_ends_in_a_step_by_a_plan(way: str) -> None:
    ends_cleanly(way, f"+{random.Random(way).uniform(0, 0.2):.3f}", ENDINGS_PLAN="1")


@pytest.mark.parametrize("way", ["os._exit", "SIGINT", "SIGKILL"])
def test_nothing_is_left_when_it_ends_while_workers_start(way: str) -> None:
    ends_cleanly(way, f"{random.Random(way).uniform(0.1, 1.5):.3f}")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("plan", ["", "1"], ids=["calls", "plan"])
@pytest.mark.parametrize("way", [*WAYS, "worker"])
def test_nothing_is_left_at_any_point(way: str, plan: str) -> None:
    points = random.Random(f"many {way}{plan}")
    for _ in range(25):
        ends_cleanly(way, f"+{points.uniform(0, 0.5):.3f}", ENDINGS_PLAN=plan)
    for _ in range(25 if way != "worker" else 0):  # there is none at first
        ends_cleanly(way, f"{points.uniform(0, 6):.3f}", ENDINGS_PLAN=plan)


@pytest.mark.parametrize("way", [pytest.param("SIGKILL", marks=pytest.mark.slow), "sys.exit"])
def test_forked_loaders_keep_no_worker_alive(way: str) -> None:
    code, _, err, mark = run(way, "+0.1", ENDINGS_LOADER="1")
    assert wait_until_gone(mark, 2.0, only_workers=True) == []
    assert wait_until_gone(mark, 20.0) == [], err
    assert code == CODES[way]


def test_a_reader_that_leaves_ends_the_program() -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "ENDINGS_NOISY": "1"}
    line = f"{sys.executable} {PROGRAM} return +1000 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line], check=True, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "begin\n"
    assert wait_until_gone(mark, 5.0) == []
