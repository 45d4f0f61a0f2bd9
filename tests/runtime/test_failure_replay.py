"""A failed call is saved and raises the same exception when replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import ArtifactError, WorkerError
from gemini.runtime import failure_replay as replaying
from gemini.runtime.failure_replay import Unsaved, load, replay
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool


class Checks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if gradient.abs().max() > ctx.limit:
            raise ArithmeticError(f"a gradient of {gradient.abs().max().item():.6f}")
        return gradient, None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.randn(16, 16) / 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        x = self.drop(x @ self.weight)
        if x.abs().max() > options["limit"]:
            raise ValueError(f"an entry of {x.abs().max().item():.6f}")
        return Checks.apply(x, options["gradients"][0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: torch.Tensor, limit: float = 1e9, gradient: float = 1e9, extra: Any = None) -> torch.Tensor:
        for part in self.parts:
            x = part(x, {"limit": limit, "gradients": (gradient,), 3: [None, True, torch.float16, extra]})
        return x


def started(pool: WorkerPool, folder: Path) -> Net:
    model = Net()
    managed = ManagedModel(model, pool, quiet=True)
    managed.record.folder = folder
    dispatch.manage(model, managed)
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
    return model


def test_a_failed_call_raises_the_same_when_it_is_replayed(pool: WorkerPool, tmp_path: Path) -> None:
    model = started(pool, tmp_path)
    for options, kind in (({"limit": 1e-3}, ValueError), ({"gradient": 1e-3}, ArithmeticError)):
        with pytest.raises(kind) as caught:
            model(torch.randn(4, 16), **options).sum().backward()
        (folder,) = [note.split()[-1] for note in caught.value.__notes__ if "saved for replay" in note]
        drawn = torch.get_rng_state()
        with pytest.raises(kind) as again:
            replay(model.eval(), folder)
        assert str(again.value) == str(caught.value)  # so dropout drew the same
        assert torch.equal(drawn, torch.get_rng_state())
        assert not model.parts[0].training
        model.train()
        found = load(folder)
        assert found.unit == ("parts.0" if kind is ValueError else "parts.3")
        assert [unit for unit, _ in found.plan] == [f"parts.{at}" for at in range(4)]
        assert "in forward" in found.traceback or "in backward" in found.traceback
        assert found.args[1][3] == [None, True, torch.float16, None]
        assert isinstance(found.args[1]["gradients"], tuple)


def test_the_last_three_are_kept_and_none_is_half_written(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        model = started(pool, tmp_path)
        for _ in range(4):
            with pytest.raises(ValueError, match="an entry"):
                model(torch.randn(4, 16), limit=1e-3)
    assert len(list(tmp_path.iterdir())) == 3

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(replaying, "save_file", full)
    before = set(tmp_path.iterdir())
    model = started(pool, tmp_path)
    with pytest.raises(ValueError, match="an entry"):
        model(torch.randn(4, 16), limit=1e-3)
    assert set(tmp_path.iterdir()) == before


def test_what_cannot_be_saved_is_named(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = started(pool, tmp_path)
    with pytest.raises(ValueError, match="an entry"):
        model(torch.randn(4, 16), limit=1e-3, extra=range(3))
    (folder,) = tmp_path.iterdir()
    assert load(folder).args[1][3][3] == Unsaved("range(0, 3)")
    with pytest.raises(ArtifactError, match=r"range\(0, 3\)"):
        replay(model, folder)
    monkeypatch.setattr(replaying, "_LARGE", 100)
    with pytest.raises(ValueError, match="an entry"):
        model(torch.randn(4, 16), limit=1e-3)
    assert isinstance(load(max(tmp_path.iterdir(), key=lambda one: one.stat().st_mtime_ns)).args[0], Unsaved)
    record = json.loads((folder / "failure.json").read_text())
    record["args"]["tuple"][1]["dict"][2][1][3] = None
    (folder / "failure.json").write_text(json.dumps(record))
    with pytest.raises(ArtifactError, match=r"no module 'parts\.0'"):
        replay(nn.Linear(1, 1), folder)
    with pytest.raises(ArtifactError, match="holds no saved failure"):
        load(tmp_path / "nothing")


def test_the_call_in_which_a_worker_was_lost_is_saved(tmp_path: Path) -> None:
    pool = WorkerPool(2, 1)
    model = started(pool, tmp_path)
    pool.workers[0].process.kill()
    with pytest.raises(WorkerError) as caught:
        model(torch.ones(4, 16))
    assert any(str(tmp_path) in note for note in caught.value.__notes__)
    (folder,) = tmp_path.iterdir()
    assert torch.equal(load(folder).args[0], torch.ones(4, 16))
    replay(model, folder)
