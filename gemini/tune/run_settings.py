"""Run configuration: a tuned configuration as the settings that `gemini_python --config` reads.

pipeline 4, micro-batch 2×8, zb_h1     →     {"mode": "pipeline", "pipeline_degree": 4, "accum_degree": 8,
                                              "schedule": "zb_h1"}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemini.atomic_files import write_whole
from gemini.config.gemini_config import GeminiConfig
from gemini.schedule.plan_files import save
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.step_simulation import StepResult


def run_settings(config: ParallelConfig) -> dict[str, Any]:
    """Return the settings of a configuration; what `GeminiConfig` has no setting for is left out."""
    settings: dict[str, Any] = {"accum_degree": config.micro_batches}
    if config.tensor > 1:
        settings |= {"mode": "hybrid" if config.pipeline > 1 else "sharding", "sharding_size": config.tensor}
    else:
        settings["mode"] = "pipeline"
    if config.pipeline > 1 or config.tensor == 1:
        settings["pipeline_degree"] = config.pipeline
    if config.data > 1 and config.tensor == 1:
        settings |= {"replicas": config.data, "accum_degree": config.data * config.micro_batches}
    if config.pipeline > 1 and config.schedule != "composed":
        settings["schedule"] = config.plan_name
    if config.schedule == "composed":
        settings["schedule"] = "composed"
    return settings


def omitted_settings(config: ParallelConfig) -> list[str]:
    """Return what a run with `gemini_python` does not take from the configuration."""
    found = []
    if config.data > 1 and config.tensor > 1:
        found.append(f"data {config.data} with shards: start one process per replica")
    if config.chunks > 2:
        found.append(f"chunks {config.chunks}: a run has at most 2 stages per worker")
    if config.context > 1:
        found.append(f"context {config.context}")
    if config.expert > 1:
        found.append(f"expert {config.expert}")
    if config.zero:
        found.append(f"ZeRO {config.zero}")
    if config.recompute != "none":
        found.append(f"recompute {config.recompute}: the planner recomputes where memory requires it")
    return found


def write_run_config(result: StepResult, path: str | Path) -> Path:
    """Write the settings; they are checked first."""
    settings = GeminiConfig(**run_settings(result.config)).differences()
    write_whole(Path(path), json.dumps(settings, indent=2) + "\n")
    return Path(path)


def save_schedule(result: StepResult, path: str | Path) -> Path | None:
    """Write the plan of the schedule; None without a pipeline."""
    plan = result.run.plan
    if plan is None:
        return None
    save(plan, Path(path))
    return Path(path)
