"""Folders of stages are complete, validated before use, and never overwrite unrelated files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini.errors import ArtifactError, CaptureError, GeminiError, PartitionError
from gemini.pipe import Piped
from gemini.pipe import stage_folder as folders
from tests.pipe.models import Bert, make

FILES = {"manifest.json", "graph.json", "partition.json", "profile.json", "stage_0.py", "stage_1.py"}


@pytest.fixture
def saved(pipe, tmp_path) -> tuple[Piped, Path, tuple, dict]:
    model, args, kwargs = make("t5")
    piped = pipe(model, args, kwargs, nparts=2, output=tmp_path / "stages")
    return piped, tmp_path / "stages", args, kwargs


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_holds_everything_and_no_weights(saved):
    _, folder, *_ = saved
    assert {path.name for path in folder.iterdir()} == FILES
    assert not [path for path in folder.parent.iterdir() if path != folder]  # nothing left beside it


def test_a_loaded_folder_runs_like_the_model(saved):
    piped, folder, args, kwargs = saved
    model, *_ = make("t5", seed=3)
    again = Piped.load(folder, model)
    assert again.sources == piped.sources
    assert json.dumps(again.partition.to_json()) == json.dumps(piped.partition.to_json())
    assert again.profile == piped.profile
    assert again.interfaces == piped.interfaces
    assert again.analysis.to_json() == piped.analysis.to_json()
    report = again.check(args, kwargs)
    assert report.is_right, str(report)


FRESH = """
import sys, torch
from gemini.pipe import Piped
from tests.pipe.models import make
model, args, kwargs = make("t5")
piped = Piped.load(sys.argv[1], model)
report = piped.check(args, kwargs)
assert report.is_exact, report
print(type(piped.stages[0]).__module__, piped.stages[0].forward.__code__.co_filename)
"""


def test_in_a_fresh_process(saved):
    _, folder, *_ = saved
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == str(folder / "stage_0.py")


def test_the_manifest_says_how_the_stages_fit_together(saved):
    piped, folder, *_ = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["made"]["model"] == "tests.pipe.models.T5"
    assert manifest["made"]["partitioner"] == "exact"
    assert manifest["made"]["torch"] == torch.__version__
    assert set(manifest["inputs"]) == {"ids", "targets"}
    assert manifest["inputs"]["ids"]["batch_dim"] == 0
    assert [stage["file"] for stage in manifest["stages"]] == ["stage_0.py", "stage_1.py"]
    for stage in manifest["stages"]:
        for name in (*stage["inputs"], *stage["outputs"]):
            value = manifest["values"][name]
            assert value["kind"] == "number" or {"shape", "dtype", "gradient", "batch_dim"} <= value.keys()
    sent = {name for link in manifest["links"] if link["from"] == 0 and link["to"] == 1 for name in link["values"]}
    assert sent == {name for name, value in manifest["values"].items() if value["from"] == 0 and 1 in value["to"]}
    assert set(manifest["parameters"]) == {n for n, _ in piped.model.named_parameters(remove_duplicate=False)}
    assert manifest["parameters"]["shared.weight"]["tied"] == ["shared.weight", "head.weight"]
    assert manifest["parameters"]["shared.weight"]["sync"] == [0, 1]
    assert "sync" not in manifest["parameters"]["encoder.0.up.weight"]


# ── edited, stale, foreign ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", sorted(FILES))
def test_an_edited_file_is_named_and_nothing_runs(saved, name):
    piped, folder, *_ = saved
    text = (folder / name).read_text()
    trap = folder.parent / "executed"
    added = f"\nopen({str(trap)!r}, 'w')\n" if name.endswith(".py") else " "
    (folder / name).write_text(text.replace("{", "{ ", 1) + added)
    if name == "manifest.json":
        (folder / name).write_text(text.replace('"nparts": 2', '"nparts": 3', 1))
    with pytest.raises(ArtifactError, match=rf"{name}.* was edited"):
        Piped.load(folder, piped.model)
    assert not trap.exists()


def test_all_changed_files_are_named_and_regenerated(saved):
    piped, folder, args, kwargs = saved
    before = contents(folder)
    (folder / "stage_0.py").write_text("raise SystemExit")
    (folder / "stage_1.py").unlink()
    with pytest.raises(ArtifactError) as told:
        Piped.load(folder, piped.model)
    assert "stage_0.py was edited" in str(told.value)
    assert "stage_1.py is missing" in str(told.value)
    assert "regenerate=True" in str(told.value)
    again = Piped.load(folder, piped.model, regenerate=True)
    assert again.check(args, kwargs).is_right
    assert contents(folder) == before
    Piped.load(folder, piped.model)


def test_a_partition_edited_by_hand_is_taken_on_request(saved):
    piped, folder, args, kwargs = saved
    data = json.loads((folder / "partition.json").read_text())
    first, second = data["stages"]
    data["stages"] = [sorted([*first, second[0]]), second[1:]]
    (folder / "partition.json").write_text(json.dumps(data))
    again = Piped.load(folder, piped.model, regenerate=True)
    assert second[0] in again.partition.stages[0]
    assert again.check(args, kwargs).is_right
    data["stages"] = [second, first]
    (folder / "partition.json").write_text(json.dumps(data))
    with pytest.raises(PartitionError, match="later stage"):
        Piped.load(folder, piped.model, regenerate=True)


def test_an_edited_folder_is_replaced_only_on_request(saved):
    piped, folder, *_ = saved
    edited = (folder / "stage_1.py").read_text() + "# mine\n"
    (folder / "stage_1.py").write_text(edited)
    with pytest.raises(ArtifactError, match=r"(?s)stage_1.py was edited.*overwrite"):
        piped.save(folder)
    assert (folder / "stage_1.py").read_text() == edited
    piped.save(folder, overwrite=True)
    assert (folder / "stage_1.py").read_text() == piped.sources["stage_1.py"]


def test_another_partition_takes_the_place_of_the_old_one(pipe, saved):
    piped, folder, args, kwargs = saved
    three = pipe(piped.model, args, kwargs, nparts=3)
    three.save(folder)
    assert (folder / "stage_2.py").exists()
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("keep")
    (folder / "__pycache__").mkdir()
    piped.save(folder)
    assert {path.name for path in folder.iterdir()} == {*FILES, "notes"}  # what is not ours is kept
    assert (folder / "notes" / "mine.txt").read_text() == "keep"


def test_a_folder_of_somebody_else_is_left_alone(saved, tmp_path):
    piped, *_ = saved
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(ArtifactError, match="not replaced"):
            piped.save(home, overwrite=overwrite)
    assert contents(home) == {"thesis.txt": b"years"}
    (tmp_path / "empty").mkdir()
    piped.save(tmp_path / "empty")
    piped.save(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep" / "manifest.json").exists()


def test_a_file_where_a_folder_should_be(saved, tmp_path):
    piped, *_ = saved
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file"):
        piped.save(tmp_path / "file")
    with pytest.raises(ArtifactError, match="is a file"):
        Piped.load(tmp_path / "file", piped.model)
    with pytest.raises(ArtifactError, match="is not a folder"):
        piped.save(tmp_path / "file" / "below")
    with pytest.raises(ArtifactError, match="does not exist"):
        Piped.load(tmp_path / "nowhere", piped.model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="manifest"):
        Piped.load(tmp_path / "empty", piped.model)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_may_not_be_written(saved, tmp_path):
    piped, *_ = saved
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(ArtifactError, match="cannot be written"):
        piped.save(tmp_path / "locked" / "stages")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system where no folder can be made")
def test_a_file_system_that_refuses(saved):
    piped, *_ = saved
    with pytest.raises(ArtifactError, match="cannot be written"):
        piped.save("/proc/stages")


def test_the_folder_is_checked_before_the_work_begins(pipe, tmp_path):
    class Never(nn.Module):
        def forward(self, x):
            raise AssertionError("it ran")

    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="is a file"):
        pipe(Never(), (torch.ones(2),), output=tmp_path / "file")


def test_a_folder_of_another_model(saved):
    _, folder, *_ = saved
    with pytest.raises(CaptureError, match="T5, this is a Bert"):
        Piped.load(folder, Bert())


class Settles(nn.Module):
    """Decides with its first call what it is, as classifiers of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.problem = None

    def forward(self, x):
        if self.problem is None:
            self.problem = "one label" if x.dim() == 2 else "several"
        for layer in self.layers:
            x = layer(x)
        return x if self.problem == "one label" else x.sum()


def test_a_model_that_is_not_yet_in_its_state(pipe, tmp_path):
    x = torch.randn(3, 4)
    pipe(Settles(), (x,), nparts=2, output=tmp_path / "stages")
    fresh = Settles().eval()
    with pytest.warns(UserWarning, match=r"(?s)not in the state.*training.*'one label' is now None"):
        piped = Piped.load(tmp_path / "stages", fresh)
    piped.save(tmp_path / "again")
    piped.train()
    with pytest.warns(UserWarning, match="runs the original model"):
        piped(x)
    assert piped.fallbacks == 1
    assert torch.equal(piped(x), fresh(x))
    assert piped.check((x,)).is_exact
    assert piped.fallbacks == 1
    assert contents(tmp_path / "again") == contents(tmp_path / "stages")


def test_stages_of_another_version_are_told(saved, monkeypatch):
    piped, folder, *_ = saved
    monkeypatch.setattr("gemini.cache_files.__version__", "9.9")
    with pytest.warns(UserWarning, match=r"made with gemini .* \(now 9\.9\)"):
        Piped.load(folder, piped.model)


def test_a_link_to_a_folder_stays_a_link(saved, tmp_path):
    piped, folder, *_ = saved
    link = tmp_path / "latest"
    link.symlink_to(folder)
    piped.save(link)
    assert link.is_symlink()
    assert {path.name for path in folder.iterdir()} == FILES


# ── crashes ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("at", range(0, 12, 2))
def test_a_full_disk_leaves_the_old_folder(pipe, saved, monkeypatch, at):
    piped, folder, args, kwargs = saved
    before = contents(folder)
    three = pipe(piped.model, args, kwargs, nparts=3)
    count = 0

    def write(path, content, real=folders._write):
        nonlocal count
        count += 1
        if count > at:
            path.write_bytes(content[:10])
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(folders, "_write", write)
    if at < 7:  # that many files
        with pytest.raises(ArtifactError, match="No space left"):
            three.save(folder)
        assert contents(folder) == before
    else:
        three.save(folder)
        assert (folder / "stage_2.py").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["stages"]


@pytest.mark.parametrize(("moment", "call"), [("_write", 1), ("_write", 4), ("_sync", 1), ("_replace_folder", 1)])
def test_a_kill_in_the_middle_leaves_the_old_folder(saved, moment, call):
    piped, folder, *_ = saved
    before = contents(folder)
    child = os.fork()
    if not child:
        _save_and_die(piped, folder, moment, call)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert contents(folder) == before
    Piped.load(folder, piped.model)
    piped.save(folder)


def _save_and_die(piped, folder, moment, call):
    """In a process of its own: kill it at the given call of a step of saving."""
    real, calls = getattr(folders, moment), 0

    def killed(*args):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    try:
        setattr(folders, moment, killed)
        piped.save(folder)
    finally:
        os._exit(1)


def test_without_an_exchange_of_names(saved, monkeypatch):
    piped, folder, *_ = saved
    before = contents(folder)
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    piped.save(folder)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["stages"]


def test_a_model_that_cannot_be_written_down_leaves_nothing(pipe, tmp_path):
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = Local.apply(layer(x))
            return x

    try:
        piped = pipe(Model(), (torch.randn(2, 4),), nparts=2)
    except GeminiError:
        return  # refused at once, with a reason
    with pytest.raises(GeminiError):
        piped.save(tmp_path / "stages")
    assert not list(tmp_path.iterdir())
