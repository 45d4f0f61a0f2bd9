"""Exported stages train under torchrun without Gemini, with the losses and weights of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemini.cli.main import main

MODEL = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, masked=False):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight  # tied, in the first and the last stage
        self.masked = masked

    def forward(self, ids, labels):
        first = x = self.embed(ids)
        mask = (ids % 5 > 0).unsqueeze(-1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (mask if self.masked else 1.0)
        logits = self.head(x + first)  # a skip over all stages
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(masked=False):
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (8, 6))
    return Model(masked), (ids,), {"labels": ids.roll(1)}


def make_masked():
    return make(True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def pipe(function: str, parts: int = 2) -> None:
    words = ["pipe", f"models.py:{function}", "--nparts", str(parts), "--analytic", "cpu", "--output", "stages"]
    assert main(words) == 0


def train_here(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    names: dict[str, object] = {}
    exec((folder / "models.py").read_text(), names)
    model, args, kwargs = names["make"]()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*args, **kwargs)["loss"]
        loss.backward()
        optimizer.step()
        lines.append(loss.item())
    return lines, model.state_dict()


def test_two_processes_train_as_one(folder: Path) -> None:
    pipe("make")
    assert main(["export", "stages", "--target", "torch-pipelining", "--micro-batches", "4"]) == 0
    sources = [path.read_text() for path in (folder / "export").glob("*.py")]
    assert len(sources) == 3
    assert not any("import gemini" in text or "from gemini" in text for text in sources)
    words = [
        "--nproc-per-node",
        "2",
        "export/run.py",
        "models.py:make",
        "--steps",
        "3",
        "--lr",
        "0.1",
        "--save",
        "end.pt",
    ]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("torchrun")), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines, expected = train_here(folder)
    found_losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert found_losses == pytest.approx(lines, rel=1e-6)
    found = torch.load("end.pt", weights_only=True)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_value_without_a_gradient_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe("make_masked")
    assert main(["export", "stages"]) == 2
    told = capsys.readouterr().err
    assert "torch.distributed.pipelining cannot run stages:" in told
    assert "has no gradient, and its runtime returns one" in told
    assert not (folder / "export").exists()


def test_a_schedule_that_does_not_fit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe("make")
    assert main(["export", "stages", "--schedule", "unheard"]) == 2
    assert "unheard does not run on stages on workers [0, 1]" in capsys.readouterr().err
    assert main(["export", "stages", "--target", "tpu"]) == 2
    assert "unknown target 'tpu'" in capsys.readouterr().err
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").touch()
    assert main(["export", "stages", "-o", "full"]) == 2
    assert "full is not empty and not an earlier export" in capsys.readouterr().err
