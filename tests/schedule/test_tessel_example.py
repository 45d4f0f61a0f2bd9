"""The Tessel example runs for every placement and builds the shapes it names."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gemini.schedule import SchedPlan
from gemini.schedule.placements import PLACEMENTS, placement

SCRIPT = Path(__file__).parents[2] / "examples" / "simulator" / "cases_tessel.py"


def shape(plan: SchedPlan) -> list[tuple[object, ...]]:
    return sorted(
        (str(block), plan.device(block), block.span, block.memory, sorted(map(str, block.before))) for block in plan
    )


@pytest.mark.parametrize("infer", [False, True])
@pytest.mark.parametrize("name", ["vshape", "mshape"])
def test_what_it_builds_by_hand_is_the_placement_of_that_name(name: str, infer: bool) -> None:
    built = runpy.run_path(str(SCRIPT))["BUILT_HERE"][name](4, infer)
    assert shape(built) == shape(placement(name, 4, not infer))


@pytest.mark.parametrize("infer", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_runs(
    name: str, infer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--placement {name} --ndevs 4 --nmicros 6 --memory 8 --save {tmp_path}/plan.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments.split(), *(["--infer"] if infer else [])])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    plan = SchedPlan.load(tmp_path / "plan.json").validate(8)
    assert plan.nmicros == 6
    assert "peak memory:" in capsys.readouterr().out


def test_as_a_process_a_mistake_is_one_message() -> None:
    command = [sys.executable, str(SCRIPT), "--placement", "wshape"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("cases_tessel.py: no placement is called 'wshape'")
    assert "Traceback" not in done.stderr
