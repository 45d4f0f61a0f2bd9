"""Predictions agree with published runs that were not used to choose the efficiencies of the device classes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

import gemini
from gemini.cluster import load_cluster
from gemini.tune import TransformerCosts, simulate
from gemini.tune.parallel_config import read_parallel
from gemini.tune.transformer_model import read_transformer

RUNS = Path(gemini.__file__).parent.parent / "benchmarks" / "published_runs.jsonl"


@pytest.fixture(scope="module")
def predictions():
    found = []
    runs = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    series = [run for run in runs if "MosaicML" in run["source"]]  # long ones, of which every fourth is enough
    for run in [run for run in runs if run not in series] + series[::4]:
        model, config = read_transformer(run["model"]), read_parallel(run["parallel"])
        seconds = run.get("seconds") or config.batch * model.sequence / config.devices / run["tokens_per_device"]
        step = simulate(TransformerCosts(model), load_cluster(run["cluster"]).resized(config.devices), config)
        found.append((run, step, step.seconds / seconds - 1))
    return found


def test_few_runs_are_fitted():
    fitted = [json.loads(line)["fitted"] for line in RUNS.read_text(encoding="utf-8").splitlines()]
    assert sum(fitted) < len(fitted) / 8


@pytest.mark.slow
def test_mean_error_of_the_others(predictions):
    errors = [abs(error) for run, _, error in predictions if not run["fitted"]]
    assert statistics.fmean(errors) <= 0.05
    assert sum(error > 0.15 for error in errors) <= len(errors) * 0.06
    assert max(errors) <= 0.25


@pytest.mark.slow
def test_memory(predictions):
    errors = [step.memory.total / 2**30 / run["memory_gib"] - 1 for run, step, _ in predictions if "memory_gib" in run]
    assert statistics.fmean(map(abs, errors)) <= 0.10
