"""`gemini schedule`: what it prints, what it writes, and what it leaves alone when it fails."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.schedule import SchedPlan
from gemini.schedule.export import load_csv, load_trace

GEMINI = [sys.executable, "-m", "gemini.cli.main"]
SMALL = ["schedule", "--placement", "vshape", "--ndevs", "3", "--nmicros", "5", "--memory", "3"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; its message, having checked that it is one and nothing else was printed."""
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before
    return printed.err


# ---------------------------------------------------------------- what it does


def test_the_mshape_command_saves_a_valid_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command = "schedule --placement mshape --ndevs 4 --nmicros 6 --memory 6 --save mshape.4stages.sched.json"
    assert main(shlex.split(command)) == 0
    plan = SchedPlan.load("mshape.4stages.sched.json")
    plan.validate(6)
    assert (plan.ndevs, plan.nmicros) == (4, 6)
    assert plan.proof is not None
    assert plan.proof.period == 6
    out = capsys.readouterr().out
    assert "0F0" in out
    assert "period 6" in out
    assert "wrote mshape.4stages.sched.json" in out


def test_every_output_holds_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--save", "p.json", "--trace", "p.trace.json", "--csv", "p.csv", "--draw", "p.html"]
    assert main([*SMALL, *files]) == 0
    plan = SchedPlan.load("p.json")
    assert load_trace("p.trace.json").nsteps == plan.nsteps
    assert load_csv("p.csv", plan.placement).nsteps == plan.nsteps
    assert Path("p.html").read_text().startswith("<!doctype html>")
    assert "wrote p.html" in capsys.readouterr().out


def test_json_tells_figures_and_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--compare"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ndevs"] == 3
    assert facts["nmicros"] == 5
    assert facts["period"] == facts["lower_bound"] == 4
    assert facts["optimal"] is True
    assert facts["gap"] == 0
    assert facts["peak_memory"] == [3, 2, 1] or max(facts["peak_memory"]) <= 3
    assert {row["name"] for row in facts["compare"]} >= {"composed", "1f1b", "gpipe"}
    assert all(row["makespan"] >= facts["makespan"] for row in facts["compare"] if max(row["peak_memory"]) <= 3)


def test_compare_tables_the_known_schedules_and_marks_those_over_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--compare"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["schedule"].split() == shlex.split("schedule period bubble rate makespan peak memory of each device")
    assert "composed" in lines
    assert "!" in lines["gpipe"]
    assert "!" not in lines["1f1b"]


def test_json_of_a_plan_without_limits_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for memory in ([], ["--memory", "inf"], ["--memory", "2,inf"]):
        assert main(["schedule", "--placement", "vshape", "--ndevs", "2", "--nmicros", "3", "--json", *memory]) == 0
        json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_split_and_chunks_reach_the_placement(capsys: pytest.CaptureFixture[str]) -> None:
    command = "schedule --placement vchunks --ndevs 2 --nmicros 4 --memory 4 --split --chunks 2 --csv p.csv"
    assert main(shlex.split(command)) == 0
    assert "3I0" in Path("p.csv").read_text()
    capsys.readouterr()


def test_without_nmicros_it_chooses_enough_to_show_the_repetend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("schedule --placement vshape --ndevs 3 --memory 3 --json")) == 0
    assert json.loads(capsys.readouterr().out)["repetend"] is not None


def test_inference_has_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("schedule --placement vshape --ndevs 3 --nmicros 4 --memory 12 --infer --save p.json")) == 0
    assert {block.btype for block in SchedPlan.load("p.json")} == {"forward"}
    capsys.readouterr()


def test_a_placement_from_a_file_with_memory_for_each_device_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        {"id": 0, "type": "forward", "span": 1.5, "memory": 1, "devices": [0], "after": []},
        {"id": 1, "type": "forward", "span": 2, "memory": 2, "devices": [1], "after": [0]},
        {"id": 2, "type": "backward", "span": 2.5, "memory": -2, "devices": [1], "after": [1]},
        {"id": 3, "type": "backward", "span": 3, "memory": -1, "devices": [0], "after": [2]},
    ]
    Path("mine.json").write_text(json.dumps({"one": {"ndevs": 2, "blocks": blocks}, "two": {}}))
    command = "schedule --placement mine.json:one --memory 4,2 --latency 0.25 --nmicros 6 --save p.json"
    assert main(shlex.split(command)) == 0
    plan = SchedPlan.load("p.json")
    plan.validate((4, 2))
    assert plan.links.latency == 0.25
    capsys.readouterr()


def test_bytes_and_bandwidth_make_transfers_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    command = "schedule --placement vshape --ndevs 2 --nmicros 1 --nbytes 8 --bandwidth 4 --latency 1 --json"
    assert main(shlex.split(command)) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 8 + 2 * (1 + 8 / 4)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--placement vshap --ndevs 4", "did you mean 'vshape'"),
        ("--placement vshape", "--ndevs is missing"),
        ("--placement nosuch", "no placement is called 'nosuch'\n    → choose from vshape, "),
        ("--placement vshape --ndevs 0", "0 is not between 1 and"),
        ("--placement vshape --ndevs four", "'four' is not a whole number"),
        ("--placement kshape --ndevs 3", "kshape does not exist for 3 devices"),
        ("--placement vshape --ndevs 2 --memory abc", "'abc' is not a number"),
        ("--placement vshape --ndevs 2 --memory nan", "'nan' is not a number"),
        ("--placement vshape --ndevs 2 --memory 1,2,3", "2 devices"),
        ("--placement vshape --ndevs 2 --memory 2 --latency -1", "is negative"),
        ("--placement vshape --ndevs 2 --memory 2 --draw p.gif", ".png, .svg, .pdf, .html"),
        ("--placement vshape --ndevs 2 --memory 2 --draw p.png --save p.png", "both write p.png"),
        ("--placement vshape --ndevs 2 --memory 2 --save nowhere/p.json", "no folder nowhere"),
        ("--placement vshape --ndevs 2 --memory 2 --save .", "it is a folder"),
        ("--placement mshape --ndevs 2 --memory 4 --csv p.csv", "0F0 runs on devices 0, 1 together"),
        ("--placement vshape --ndevs 2 --chunks 2", "chunks"),
        ("--placement vshape --ndevs 99999999999", "is not between 1 and 100000"),
        ("--placement nowhere.json", "cannot read nowhere.json"),
        ("--placement nowhere.json:one", "cannot read nowhere.json"),
        ("--placement vshape --ndevs 2 --time-limit 0", "seconds above zero"),
        ("--placement vshape --ndevs 2 --bandwidth 5", "no transfer has bytes"),
        ("--placement vshape --ndevs 2 --latency inf", "finite"),
        ("--ndevs 2", "--placement"),
        ("--placement vshape --ndevs 2 --nmicros 0 --memory 2", "0 is not between 1 and"),
        ("--placement vshape --ndevs 2 --memory 0", "the least that works is 1 on device 0"),
        ("--placement vshape --ndevs 2 --memory 0.5,4", "block 0F0 takes 1 on device 0, which has 0.5"),
    ],
)
def test_a_wrong_request_is_one_message(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(["schedule", *shlex.split(arguments)], capsys)


def test_a_failed_run_leaves_every_file_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("p.json", "p.csv", "p.png", "p.trace.json"):
        Path(name).write_text("old")
    outputs = shlex.split("--save p.json --csv p.csv --draw p.png --trace p.trace.json")
    fails(["schedule", "--placement", "vshape", "--ndevs", "2", "--memory", "0", *outputs], capsys)
    fails(["schedule", "--placement", "mshape", "--ndevs", "2", "--memory", "4", *outputs], capsys)
    assert all(path.read_text() == "old" for path in Path().iterdir())


def test_a_truncated_placement_file_names_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cut.json").write_text('{"ndevs": 2, "blocks": [{"id": 0,')
    assert "cut.json: line 1" in fails(["schedule", "--placement", "cut.json"], capsys)


def test_flags_that_change_a_shape_are_refused_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.json").write_text("{}")
    assert "--split" in fails(["schedule", "--placement", "mine.json", "--split"], capsys)


# ---------------------------------------------------------------- as a process


def test_as_a_process_it_imports_no_torch() -> None:
    code = (
        "import sys; from gemini.cli.main import main; "
        f"code = main({[*SMALL, '--json']!r}); assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["optimal"] is True
    assert done.stderr == ""


def test_as_a_process_a_failure_has_exit_code_2_and_no_traceback() -> None:
    done = subprocess.run(
        [*GEMINI, "schedule", "--placement", "vshape"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gemini schedule: --ndevs is missing\n    → ")


def test_a_plan_can_be_saved_into_a_pipe() -> None:
    command = f"{sys.executable} -m gemini.cli.main {' '.join(SMALL)} --json --save /dev/stderr"
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(done.stderr)["format"] == "gemini.schedule"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m gemini.cli.main {' '.join(SMALL)} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "0"
    assert "Traceback" not in done.stderr
