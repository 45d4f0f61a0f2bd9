"""`--live`: the last row of a terminal shows the present step; other outputs have no line."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemini.planner import planning_progress
from gemini.runtime import live_line
from gemini.runtime.live_line import LiveLine, describe_step
from gemini.runtime.run_journal import ModelJournal
from tests.launcher.process.launching import GEMINI, run, script

TRAIN = """\
import sys
import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def story() -> ModelJournal:
    made = ModelJournal("Net", 2)
    made.record("overlapped")
    made.record_time(40.0)
    made.local_ms = 60.0
    events = [
        SimpleNamespace(kind="F", begin=0.0, end=1.0),
        SimpleNamespace(kind="B", begin=1.0, end=2.0),
        SimpleNamespace(kind="wait", begin=0.0, end=1.0),
    ]
    made.observe_step(events, 2, (50.0, 52.0))
    return made


def test_the_line_names_time_bubble_memory_and_gain() -> None:
    text = describe_step(story())
    assert text == "Net call 1, 40 ms per step, bubble 50%, at most 52 MB per worker, 1.50 × one device"
    assert describe_step(ModelJournal("Net", 2)) == ""


def test_the_line_is_in_the_last_row_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())  # the terminal of another session
    line = LiveLine(screen)
    line._show("x" * 100)
    written = os.read(terminal, 4096).decode()
    assert "\033[1;19r" in written, "the other rows scroll"
    assert "\033[20;1H" in written
    assert f"gemini: {'x' * 51}\033[0m" in written, "cut at the width of the terminal"
    line._show("y")
    assert "r" not in os.read(terminal, 4096).decode().partition("gemini")[0], "reserved once"
    line._thread = SimpleNamespace(join=lambda timeout: None)  # type: ignore[assignment]
    line.end()
    assert "\033[r" in os.read(terminal, 4096).decode()


def test_nothing_is_shown_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_line, "_running", [])
    live_line.start_live_line()
    assert live_line._running == []
    with planning_progress.planning_progress("Net", quiet=False):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_without_a_terminal_prints_the_same_with_live(tmp_path: Path) -> None:
    options = ["--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "2", "--live"]
    done = run([*GEMINI, *options], script("live", TRAIN), tmp_path / "run")
    assert done.code == 0
    assert "\033" not in done.stderr
    assert "overlapped" in done.stderr
