"""`gemini report`: one page of every kind of run, small, complete and shown by a browser without errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.report.journal_reader import read_run
from gemini.report.line_chart import line_chart
from gemini.report.recorded_plan import RecordedNode
from gemini.report.report_page import render_report, repeat_command
from gemini.report.scope_tree import ScopeTree, fold_by_scope
from gemini.report.timeline_svg import tick_step
from gemini.runtime.run_journal import RunJournal
from gemini.runtime.step_history import StepHistory
from tests.launcher.process.launching import GEMINI, run, script

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    loss = net(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


# ── the history of a run ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_history_counts_every_call_in_bounded_memory() -> None:
    history = StepHistory()
    for call in range(10_000):
        history.record("overlapped" if call % 10 else "dispatched", "" if call % 10 else "sizes")
        history.record_time(2.0)
    assert history.calls == 10_000
    assert len(history.buckets) <= 512
    assert sum(sum(one.counts.values()) for one in history.buckets) == 10_000
    assert sum(one.timed for one in history.buckets) == 10_000
    kinds = {kind: sum(one.counts.get(at, 0) for one in history.buckets) for at, kind in enumerate(history.kinds)}
    assert kinds == {("dispatched", "sizes"): 1000, ("overlapped", ""): 9000}
    again = StepHistory.from_json(json.loads(json.dumps(history.to_json())))
    assert (again.calls, again.size, again.buckets) == (history.calls, history.size, history.buckets)


def test_a_tree_keeps_the_order_and_the_time_of_every_stage() -> None:
    nodes = [
        RecordedNode("embed", "", "Linear", 0, 1.0, ()),
        RecordedNode("fc", "layers.0.mlp", "Linear", 0, 2.0, ()),
        RecordedNode("fc_1", "layers.1.mlp", "Linear", 1, 3.0, ()),
        RecordedNode("head", "", "Linear", 1, 1.0, ()),
    ]
    tree = fold_by_scope("Net", nodes)
    assert [part.name for part in tree.parts] == ["embed", "layers", "head"]
    layers = tree.parts[1]
    assert isinstance(layers, ScopeTree)
    assert [part.name for part in layers.parts] == ["0.mlp", "1.mlp"]
    assert tree.stage_ms == {0: 3.0, 1: 4.0}
    assert layers.shares() == [(0, 0.4), (1, 0.6)]
    assert tree.count == 4


@pytest.mark.parametrize("end", [1e-5, 0.3, 7, 99, 1000, 123456.0])
def test_axes_have_round_and_few_ticks(end: float) -> None:
    step = tick_step(end)
    assert end / step <= 10
    assert f"{step:.0e}"[0] in "125"


def test_charts_leave_out_values_that_are_not_finite() -> None:
    assert line_chart([(0, float("nan"))], 1, "loss", "") == ""
    assert "nan" not in line_chart([(0, 1.0), (1, float("nan")), (2, float("inf")), (3, 1.0)], 4, "loss", "")


# ── pages of synthetic runs ───────────────────────────────────────────────────────────────────────────────────────────
def record_run(folder: Path, workers: int, calls: int) -> None:
    """A run of one model, in the files of a real one."""
    journal = RunJournal(folder)
    story = journal.add_model("Net<b>", workers)
    for call in range(calls):
        story.record("overlapped" if call else "local", "" if call else "the first call <shows> it")
        story.record_time(10.0 + call % 7)
        story.history.buckets[-1].loss = 1 / (1 + call)
    story.verified.append((1, 1e-7, 2e-7))
    story.record_file = "plans/1-1.json"
    micro_batches = 2 * workers
    rows = [
        [worker, worker, mid, letter, (worker + mid) * 2.0 + (letter == "B"), 1.0]
        for worker in range(workers)
        for mid in range(micro_batches)
        for letter in "FB"
    ]
    memory = dict.fromkeys(("weights_mb", "gradients_mb", "optimizer_mb", "activations_mb", "working_mb"), 2.0)
    stages = [
        {"stage": at, "worker": at, "scopes": f"layer.{at}", "nodes": [at], "forward_ms": 1.0, "backward_ms": 2.0,
         "memory": memory, "depth": 1, "parameters": 10, "parameters_mb": 1.0, "shared": [], "in_mb": 0.0,
         "out_mb": 1.0, "returned_mb": 0.0, "sent_back_mb": 0.0, "input_mb": 0.0, "result_mb": 0.0, "hops": at}
        for at in range(workers)
    ]  # fmt: skip
    each = [
        {"worker": at, "stages": [at], "speed": 1.0, "forward_ms": 1.0, "backward_ms": 2.0, "load_ms": 3.0,
         "transfer_ms": 0.0, "idle": 0.1, "memory": memory, "limit_mb": None}
        for at in range(workers)
    ]  # fmt: skip
    analysis = {"format": 1, "model": "Net", "partitioner": "exact", "device": "cpu", "nparts": workers,
                "ideal_ms": 3.0, "single_ms": 100.0, "step_ms": 12.0, "schedule": "1f1b",
                "micro_batches": micro_batches, "notes": [],
                "facts": {}, "stages": stages, "workers": each, "flows": []}  # fmt: skip
    sizes = {name: size for name, size in memory.items() if name != "optimizer_mb"} | {"optimizer_mb": 0.0}
    shards = {"title": "Net on 2 shards", "head": ["scope", "weights"], "rows": [["layer.*", "weight S1"]],
              "legend": "S1: slices", "below": ["forward: 2 all-reduce"]}  # fmt: skip
    plan = {"format": 2, "memory": [sizes] * workers, "shards": shards, "step": 10,
            "name": "1f1b", "text": "", "micro_batches": micro_batches, "workers": workers,
            "stages": workers, "predicted_ms": 12.0, "profiled_ms": 11.0, "peak_mb": [9.0] * workers, "planned": rows,
            "measured": [{"ms": 14.0, "rows": rows}], "analysis": analysis,
            "nodes": [[f"n{at}", f"layer.{at}", "Linear", at, 1.0, [8, 16]] for at in range(workers)]}  # fmt: skip
    (folder / "plans").mkdir(parents=True)
    (folder / "plans" / "1-1.json").write_text(json.dumps(plan))
    journal.write()


@pytest.mark.parametrize(("workers", "calls"), [(2, 10), (64, 10_000)])
def test_a_page_of_any_size_is_complete_and_self_contained(workers: int, calls: int, tmp_path: Path) -> None:
    record_run(tmp_path, workers, calls)
    page = render_report(read_run(tmp_path), tmp_path)
    assert len(page) < 3_000_000
    assert "Net&lt;b&gt;" in page
    assert "Net<b>" not in page
    assert "&lt;shows&gt;" in page
    assert f"{calls - 1} overlapped" in page
    assert f"w{workers - 1}<" in page
    assert "weight S1" in page
    assert "2.0e-07" in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    assert "http" not in page.replace("http-equiv", "")
    for title in ("Paths of the calls", "Predicted and measured", "Schedule, planned and measured", "Workers", "Stages",
                  "Graph, folded by module", "Source", "Environment", "How to repeat"):  # fmt: skip
        assert title in page


def test_a_run_without_workers_has_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    journal = RunJournal(tmp_path / "run")
    journal.record_local("Net", "a step of 3 ms is too short to gain from workers")
    journal.write()
    assert "too short to gain" in render_report(read_run(tmp_path / "run"), tmp_path / "run")


def test_the_steps_become_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path, 2, 10)
    assert main(["report", "--run-folder", str(tmp_path), "--perfetto", str(tmp_path / "steps.json")]) == 0
    assert "1 step;" in capsys.readouterr().out
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 1 + 2 * 4 * 2
    assert {event["name"] for event in slices} >= {"step 10", "0F0", "1B3"}


def test_a_page_repeats_the_command(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.program |= {"file": "/a b/train.py", "folder": "/a b", "arguments": ["--lr", "0.1"], "module": ""}
    story = journal.add_model("Net", 2)
    story.settings = {"mode": "pipeline", "verify": True, "run_folder": "/a b/.gemini"}
    story.record("overlapped")
    journal.write()
    assert repeat_command(read_run(tmp_path)) == (
        "cd '/a b'\ngemini_python --mode pipeline --verify '/a b/train.py' --lr 0.1"
    )


# ── a real run, in a real browser ─────────────────────────────────────────────────────────────────────────────────────
def test_a_real_run_writes_a_page_that_a_browser_shows(tmp_path: Path) -> None:
    options = ["--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "2", "--report", "page.html"]
    done = run([*GEMINI, *options], script("report", TRAIN), tmp_path / "run")
    page = tmp_path / "run" / "page.html"
    assert done.code == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    losses = [float(line) for line in done.stdout.split()]
    assert f"<title>{losses[-1]:.6g}</title>" in text, "the loss of the last step"
    assert "<ins>__gemini__.step(</ins>optimizer<ins>)</ins>.step()" in text
    assert "Measured" in text
    assert re.search(r">backward [\d.]+ ms<", text), "the time at the site of backward"
    assert "not measured" not in text
    if not BROWSER:
        pytest.skip("no Chromium is installed: the page was written, not opened")
    clicked = text.replace("</body>", "<script>document.querySelector('button[data-open]').click()</script></body>")
    page.write_text(clicked, encoding="utf-8")
    shown = browse(page, "--dump-dom")
    closed = [part for part in re.findall(r"<details[^>]*>", shown.stdout) if "open" not in part]
    assert "<details" in shown.stdout
    assert not closed
    assert not re.findall(r"CONSOLE.*", shown.stderr)
    browse(page, f"--screenshot={tmp_path / 'page.png'}", "--window-size=1200,1600")
    import matplotlib.image

    picture = matplotlib.image.imread(tmp_path / "page.png")
    used = (picture[..., :3] < 0.97).any(axis=2).any(axis=1)
    assert picture.shape[:2] == (1600, 1200)
    assert used.mean() > 0.5, "most rows of the picture have content"


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
