"""Plans are cached between runs; an invalid cache file is ignored with one log line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.cache import plans
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import StepPlan
from gemini.planner.step_planner import plan_step
from gemini.schedule.plan_files import to_dict


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def planned(folder: Path, width: int = 8, **wishes: Any) -> StepPlan:
    request = PlanRequest(**{"workers": 2, "micro_batches": 2, **wishes}, cache=folder)
    return plan_step(model(width), (torch.ones(8, 4),), {}, request)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    planned(folder)
    return folder


@pytest.fixture
def kept(once: Path, tmp_path: Path) -> Path:
    """A folder with one plan."""
    return shutil.copytree(once, tmp_path / "kept")


def files(folder: Path) -> list[Path]:
    return sorted((folder / "plans").iterdir())


def test_the_second_plan_is_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = planned(tmp_path), planned(tmp_path)
    assert not first.is_cached
    assert second.is_cached
    assert "plan from cache" in str(second)
    assert second.profile == first.profile
    assert second.partition == first.partition
    assert second.analysis == first.analysis
    assert to_dict(second.schedule) == to_dict(first.schedule)
    assert [line for line in capsys.readouterr().err.splitlines() if "s so far" not in line] == []  # but for progress


@pytest.mark.parametrize(
    "other", [{"width": 9}, {"micro_batches": 4}, {"workers": 3}, {"schedule": "gpipe"}, {"seed": 1}]
)
def test_another_model_or_wish_is_planned_for_itself(kept: Path, other: dict[str, Any]) -> None:
    assert not planned(kept, **other).is_cached


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wish = PlanRequest(workers=2, micro_batches=2, cache=False)
    assert not any(plan_step(model(), (torch.ones(8, 4),), {}, wish).is_cached for _ in range(2))
    assert not list(tmp_path.rglob("*"))


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A file with a body that was changed, and a hash that fits it."""

    def damage(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data["plan"])
        data["hash"] = plans._hash_body(data["plan"])
        path.write_text(json.dumps(data))

    return damage


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"forward_ms": ', '"forward_ms": 1', 1))


DAMAGES = {
    "cut off": lambda path: path.write_text(path.read_text()[:-40]),
    "empty": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "another format": lambda path: path.write_text('{"gemini plan": 99}'),
    "another key": lambda path: path.write_text(path.read_text().replace('"key": "', '"key": "0')),
    "edited": edited,
    "a node missing": rewritten(lambda plan: plan["profile"]["nodes"].pop()),
    "stages that do not fit": rewritten(lambda plan: plan["partition"]["stages"][0].append(999)),
    "no schedule": rewritten(lambda plan: plan.pop("schedule")),
    "no blocks": rewritten(lambda plan: plan["schedule"].update(blocks=7)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_cannot_be_believed_is_passed_over(
    kept: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = files(kept)
    DAMAGES[name](path)
    assert not planned(kept).is_cached
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"gemini: cached plan not used: {path}: ")
    if name != "a folder":
        assert planned(kept, quiet=True).is_cached  # it was written anew


def test_quiet_passes_over_in_silence(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(kept)[0].write_text("")
    assert not planned(kept, quiet=True).is_cached
    assert capsys.readouterr().err == ""


def test_other_code_of_ours_plans_anew(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_hash_code", lambda: "changed")
    assert not planned(kept).is_cached


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    assert not planned(tmp_path, quiet=True).is_cached


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_LIMIT", 2)
    for at, width in enumerate((5, 6, 7)):
        planned(tmp_path, width)
        for path in files(tmp_path):
            if path.stat().st_mtime > 100:
                os.utime(path, (at, at))
    assert len(files(tmp_path)) == 2
    assert not planned(tmp_path, 5).is_cached


def test_runs_that_share_a_folder_see_whole_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One writes and removes over and over while others read."""
    plan = planned(tmp_path)
    (path,) = files(tmp_path)
    key, over = path.stem, threading.Event()
    entry = plans.CachedPlan(plan.profile, plan.partition, plan.analysis, plan.schedule)

    def write() -> None:
        while not over.is_set():
            path.unlink(missing_ok=True)
            plans._write(path, key, entry)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [plans._read(path, key, plan.graph) for _ in range(50)]
    finally:
        over.set()
        writer.join()
    assert all(one is None or one.profile == plan.profile for one in found)
    assert capsys.readouterr().err == ""


def test_another_process_finds_it(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.cache.test_plan_cache import planned\n"
        "print(planned(Path(sys.argv[1])).is_cached)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)]
    assert said == ["False", "True"]


def test_the_stages_of_a_kept_plan_compute_the_same(kept: Path) -> None:
    x = torch.ones(8, 4)
    assert torch.equal(planned(kept).build()(x), model()(x))
