"""Models that a program drops are freed together with their shared memory."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.interception import dispatch


def trained(folder: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(folder))
    GeminiCompiler().compiler(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 16)).sum().item()
    return model.train()


def shared() -> int:
    """Pieces of memory that this process shares with workers."""
    found = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum("memfd:gemini " in os.readlink(one) for one in found if os.path.islink(one))


@pytest.mark.slow
def test_models_trained_one_after_the_other_do_not_pile_up(tmp_path: Path) -> None:
    gc.collect()
    before, held = shared(), []
    for _ in range(3):
        model = trained(tmp_path)
        managed = dispatch.find_managed(model)
        assert managed is not None
        assert managed.pipelined is not None
        assert managed.pipelined.steps
        held.append(weakref.ref(model))
        del model, managed
    gc.collect()
    assert [one() for one in held] == [None] * 3
    assert shared() <= before + 2  # what the workers of all models use


def test_copies_and_files_have_nothing_of_it(tmp_path: Path) -> None:
    model = trained(tmp_path)
    assert dispatch.find_managed(model) is not None
    assert dispatch.find_managed(copy.copy(model)) is None
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert dispatch.find_managed(made) is None
        torch.testing.assert_close(made.state_dict(), model.state_dict())
    body = io.BytesIO()
    torch.save(model, body)
    assert b"gemini." not in body.getvalue()  # it can be opened without this package
    assert "gemini" not in repr(vars(model))


def test_a_module_without_such_a_table_is_managed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    monkeypatch.delitem(vars(model), "_load_state_dict_post_hooks")
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, quiet=True, run_folder=str(tmp_path))
    GeminiCompiler().compiler(model, config)
    assert dispatch.find_managed(model) is not None
