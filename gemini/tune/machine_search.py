"""Machine search: the configurations that a run on this machine can have, for `gemini tune` and `mode="auto"`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemini.errors import ConfigError
from gemini.schedule.library import LIBRARY
from gemini.tune.local_machine import local_cluster
from gemini.tune.machine_capture import plan_costs
from gemini.tune.run_settings import run_settings
from gemini.tune.tuner import tune
from gemini.tune.tuning_request import TuningRequest

if TYPE_CHECKING:
    from gemini.config.gemini_config import GeminiConfig
    from gemini.planner.step_plan import StepPlan
    from gemini.tune.machine_costs import MachineCosts
    from gemini.tune.parallel_config import ParallelConfig
    from gemini.tune.step_simulation import StepResult
    from gemini.tune.tuning_result import TuningResult

FIXED = {
    "precision": "fp32", "kernels": "eager", "sequence_parallel": False, "overlap_data": False,
    "zero": 0, "recompute": "none", "context": 1, "expert": 1,
}  # fmt: skip
_CHUNKS = (1, 2)  # as the planner of a run makes them
_FINALISTS = 6  # of a search within a run: its planner simulates the schedules again
_MIN_GAIN = 0.05  # another configuration than the planned one must be faster by this: it is planned again
_LEAST_PARTS = 8  # into which the batch of a search divides evenly


def machine_request(
    costs: MachineCosts,
    workers: int,
    batch: int,
    *,
    fixed: dict[str, Any] | None = None,
    among: dict[str, tuple[Any, ...]] | None = None,
    memory_limit: float | None = None,
    **limits: Any,
) -> TuningRequest:
    """Return the request of a search over up to that many workers of this machine."""
    among = dict(among or {})
    if "chunks" not in (fixed or {}):
        among.setdefault("chunks", _CHUNKS)
    given = {**{name: value for name, value in FIXED.items() if name not in among}, **(fixed or {})}
    cluster = local_cluster(workers, memory_limit)
    return TuningRequest(costs, cluster, batch, given, among, max_devices=workers, runs_here=True, **limits)


def choose_for_run(
    plan: StepPlan, config: GeminiConfig, local_s: float, micro_batches: int | None
) -> tuple[GeminiConfig, list[str]]:
    """Return the settings of the fastest configuration with workers, and the others with what they cost.

    The model's step has been planned under `config` and takes `local_s` in this process. `micro_batches` are those
    that the user requested; None: the search chooses them.
    """
    try:
        result = _search(plan, config, local_s, micro_batches)
    except ConfigError:  # nothing but the planned configuration is possible
        return config, []
    by_speed = sorted((*result.ranked, *result.found), key=lambda one: one.seconds)
    chosen = next((one for one in result.ranked if one.config.devices > 1), None)
    if chosen is None:
        return config, []
    planned = next((one for one in by_speed if _is_planned(one.config, config)), None)
    if planned is not None and chosen.seconds > (1 - _MIN_GAIN) * planned.seconds:
        chosen = planned
    is_planned = chosen is planned
    return config if is_planned else _apply(chosen, config), _explain_choice(result, chosen)


def _is_planned(one: ParallelConfig, config: GeminiConfig) -> bool:
    """Return whether a plan of pipelines under these settings is what a configuration describes."""
    return (
        one.kind == "pipeline" and one.pipeline == config.pipeline_degree and one.micro_batches == config.accum_degree
    )


def _search(plan: StepPlan, config: GeminiConfig, local_s: float, micro_batches: int | None) -> TuningResult:
    workers, batch = config.worker_count, _even_batch(plan, micro_batches)
    costs = plan_costs(plan, workers, local_s)
    fixed: dict[str, Any] = {}
    among: dict[str, tuple[Any, ...]] = {}
    if plan.single_micro_batch_reason:
        fixed["micro_batch"] = batch
    elif micro_batches:
        among["micro_batch"] = tuple({batch // (micro_batches * part) or 1 for part in range(1, workers + 1)})
    if config.schedule in LIBRARY:
        fixed["schedule"] = config.schedule
    request = machine_request(
        costs, workers, batch, fixed=fixed, among=among, memory_limit=config.memory_limit, finalists=_FINALISTS,
        composed=0,
    )  # fmt: skip
    return tune(request)


def _even_batch(plan: StepPlan, micro_batches: int | None) -> int:
    """Return the batch size, rounded down to one that divides evenly: a run splits any batch."""
    parts = micro_batches or _LEAST_PARTS
    size = plan.batch.size
    return size if plan.single_micro_batch_reason or size < parts else size // parts * parts


def _apply(result: StepResult, config: GeminiConfig) -> GeminiConfig:
    """Return the settings of a run with a configuration; the schedule is left to the planner of the run."""
    settings = run_settings(result.config)
    settings.pop("schedule", None)
    degrees = dict.fromkeys(("mode", "pipeline_degree", "sharding_size", "replicas", "accum_degree"))
    return type(config)(**{**config.to_dict(), **degrees, **settings})


def _explain_choice(result: TuningResult, chosen: StepResult) -> list[str]:
    """Return the choice and the best configuration of every other kind, each with what it costs."""
    lines = [f"{chosen.config.label()}: {chosen.seconds * 1e3:.0f} ms per step predicted"]
    others = result.best_by_kind()
    ranked = replace(result, ranked=(chosen, *result.ranked))
    for kind, one in others.items():
        if one.config.kind != chosen.config.kind and one.config.devices > 1:
            lines.append(f"{kind}: {ranked.compare(one)}")
    return lines
