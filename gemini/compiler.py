"""The tour: `GeminiCompiler` takes one model through the whole flow.

    capture → profile → partition → shard → schedule → generate → run

Each step becomes a line here as it is built. What exists today: the configuration is checked, workers are started, and
parts of the model run in them while the program's own forward runs here. The model keeps its identity.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault

if TYPE_CHECKING:
    from torch import nn

    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.call_signature import Planner

Model = TypeVar("Model", bound="nn.Module")


class GeminiCompiler:
    """Makes a model run in parallel without changing how it is used."""

    def compiler(self, model: Model, config: GeminiConfig | None = None) -> Model:
        """Return `model` itself, managed under `config` (by default what the environment says)."""
        from torch import nn

        if not isinstance(model, nn.Module):
            raise ConfigError(
                [Fault(f"a model is a torch.nn.Module, not {type(model).__name__}", "pass the model object itself")],
                "GeminiCompiler.compiler",
            )
        if config is not None and not isinstance(config, GeminiConfig):
            raise ConfigError(
                [Fault(f"config is a GeminiConfig, not {type(config).__name__}", "write GeminiConfig(mode=…)")],
                "GeminiCompiler.compiler",
            )
        settings = config or GeminiConfig.load()
        if settings.asks_for_workers:
            from gemini.runtime.session import start

            start(model, settings, planner_for(settings))
        elif not settings.quiet:
            print(
                f"gemini: {type(model).__name__} runs in this process: no workers are asked for "
                "(GeminiConfig(mode=pipeline, pipeline_degree=2))",
                file=sys.stderr,
            )
        return model


def check_schedule(config: GeminiConfig) -> None:
    """Where a plan is asked for by its file, raise what is wrong with it: before a program, or a worker, starts."""
    if config.schedule.endswith(".json") and config.worker_count > 1 and config.mode.pipelines:
        from gemini.schedule.user_plan import asked_plan

        asked_plan(Path(config.schedule), config.worker_count, config.accum_degree or 1)


def planner_for(config: GeminiConfig) -> Planner | None:
    """What makes plans of whole steps under a configuration; None where steps are not to run by one."""
    check_schedule(config)
    count, pieces = config.worker_count, config.accum_degree or 1
    if count < 2 or pieces < 2 or config.schedule == "none" or not (config.mode.pipelines or config.mode is Mode.AUTO):
        return None
    schedule = str(Path(config.schedule).absolute()) if config.schedule.endswith(".json") else config.schedule

    def plan(model: nn.Module, args: Any, kwargs: Any, **changes: Any) -> StepPlan:
        from gemini.planner.plan_request import PlanRequest
        from gemini.planner.step_planner import plan_step

        limit = None if config.memory_limit is None else config.memory_limit / 2**20
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        request = PlanRequest(
            count, pieces, threads, config.partitioner, schedule, limit, config.rng,
            seed=config.seed, micro_batch_statistics=config.batch_norm == "micro-batch", quiet=config.quiet,
        )  # fmt: skip
        return plan_step(model, args, kwargs, replace(request, **changes))

    return plan
