"""Planner of a configuration: the function that plans the training steps of a model under a `GeminiConfig`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault

if TYPE_CHECKING:
    from torch import nn

    from gemini.planner.step_plan import StepPlan


class Planner(Protocol):
    """Makes the plan for a call; `changes` are fields of its `PlanRequest` that the runtime sets for this call."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, **changes: Any) -> StepPlan:
        """Return the plan for calls like this one; raises UnplannableError."""


def check_config(config: GeminiConfig) -> None:
    """Raise for unsupported settings and for a faulty schedule file, before the script or a worker starts."""
    config.check_supported()
    if config.schedule.endswith(".json") and config.stage_count > 1:
        from gemini.schedule.user_plan import group_size, load_user_plan

        plan = load_user_plan(Path(config.schedule), config.stage_count, config.accum_degree or 1)
        if group_size(plan) > 1 and not config.mode.shards:
            what = f"{config.schedule} has blocks on {group_size(plan)} workers at once, mode = '{config.mode}'"
            raise ConfigError([Fault(what, "use mode='hybrid'")])
        if group_size(plan) > 1 and config.shard_count > 1:
            what = f"{config.schedule} has blocks on several workers at once, sharding_size = {config.shard_count}"
            raise ConfigError([Fault(what, "leave sharding_size out: the schedule says which workers share a stage")])


def _has_groups(path: Path) -> bool:
    """Return whether the schedule of a file has blocks on several workers at once."""
    from gemini.schedule.schedplan import SchedPlan
    from gemini.schedule.user_plan import group_size

    return group_size(SchedPlan.load(path)) > 1


def planner_for(config: GeminiConfig) -> Planner | None:
    """Return the planner of a configuration; None if it does not request plans of whole steps."""
    check_config(config)
    count, micro_batches, shards = config.worker_count, config.accum_degree or 1, config.shard_count
    if count < 2 or config.schedule == "none" or (micro_batches < 2 and shards < 2):
        return None
    schedule = str(Path(config.schedule).absolute()) if config.schedule.endswith(".json") else config.schedule
    grouped = config.schedule.endswith(".json") and _has_groups(Path(config.schedule))
    program = None
    if config.program is not None:
        from gemini.parallel_program.compiled_plans import load_compiled_plans

        program = load_compiled_plans(Path(config.program).resolve(), config.quiet)

    here = count if config.cluster is None else 1  # workers on other hosts have cores of their own
    threads = max(1, len(os.sched_getaffinity(0)) // here)
    if config.cluster is not None:  # as many as here
        from torch import get_num_threads

        threads = min(threads, get_num_threads())

    def plan(model: nn.Module, args: Any, kwargs: Any, **changes: Any) -> StepPlan:
        from gemini.planner.plan_request import PlanRequest
        from gemini.planner.step_planner import plan_step

        request = PlanRequest(
            workers=config.stage_count, shards=shards, grouped=grouped, sharding_dim=config.sharding_dim,
            sharding_overrides=config.sharding_overrides or "",
            micro_batches=micro_batches,
            replicas=config.replicas or 1, may_replicate=_leaves_replicas_open(config), threads=threads,
            partitioner=config.partitioner, schedule=schedule, rng=config.rng, seed=config.seed, quiet=config.quiet,
            memory_limit_mb=None if config.memory_limit is None else config.memory_limit / 2**20,
            micro_batch_statistics=config.batch_norm == "micro-batch", program=program,
        )  # fmt: skip
        request = replace(request, **changes)
        leaders = range(0, config.worker_count, shards)  # the first worker of each group of shards
        return plan_step(model, args, kwargs, replace(request, links=request.links.between(leaders)))

    return plan


def _leaves_replicas_open(config: GeminiConfig) -> bool:
    """Whether a configuration requests workers of this host and neither stages, shards, replicas nor a schedule."""
    requested = (config.replicas, config.pipeline_degree, config.sharding_size, config.device_mapping, config.cluster)
    is_open = config.mode is Mode.AUTO and config.schedule == "auto" and config.program is None
    return is_open and config.memory_limit is None and requested == (None,) * len(requested)
