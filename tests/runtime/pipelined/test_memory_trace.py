"""A step trace records the predicted and the peak memory of each worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.interception import dispatch
from gemini.runtime.pipelined.step_trace import StepTrace

SIDE = 1024  # of a weight: 4 MB


@pytest.mark.slow
def test_measured_beside_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[StepTrace] = []
    save = StepTrace.save
    monkeypatch.setattr(StepTrace, "save", lambda self, folder: traces.append(self) or save(self, folder))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(8)))
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule="1f1b", quiet=True, trace=True,
        run_folder=str(tmp_path),
    )  # fmt: skip
    GeminiCompiler().compiler(model, config)
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    try:
        for _ in range(6):
            model.zero_grad()
            model(torch.ones(8, SIDE)).square().mean().backward()
    finally:
        managed.pool.stop()
    (trace,) = traces
    assert len(trace.peak_mb) == len(trace.predicted_mb) == 2
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    assert weights < sum(trace.peak_mb) < 4 * weights, trace  # weights and gradients, and what is kept for a while
    assert weights < sum(trace.predicted_mb) < 4 * weights, trace
    assert f"largest worker {max(trace.peak_mb):.0f} MB, {max(trace.predicted_mb):.0f} predicted" in str(trace)
    for step in managed.pipelined.journal.traces:
        assert Path(step).is_file()


@pytest.mark.slow
def test_runs_do_not_overwrite_traces_of_each_other(tmp_path: Path) -> None:
    """Two models of one class in one run folder."""
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule="1f1b", quiet=True, trace=True,
        run_folder=str(tmp_path),
    )  # fmt: skip
    written: list[str] = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        GeminiCompiler().compiler(model, config)
        managed = dispatch.find_managed(model)
        assert managed is not None
        assert managed.pipelined is not None
        for _ in range(6):
            model(torch.ones(8, 8)).square().mean().backward()
        assert managed.pipelined.journal.traces
        written += managed.pipelined.journal.traces
    managed.pool.stop()
    assert len({*written}) == len(written)
    assert all(Path(path).is_file() for path in written)
