"""Composed schedule: a plan that the composer finds for the times of one configuration's stages.

It is tried for pipelines of few stages, where the solver ends in time, and taken only where it is faster than the
schedule of the library in the memory that the device has left.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.errors import GeminiError
from gemini.schedule.composer import Composer
from gemini.schedule.link_costs import Links
from gemini.schedule.placements import placement
from gemini.schedule.simulate import simulate as execute
from gemini.tune.layer_cost import CostModel
from gemini.tune.pipeline_run import PipelineRun
from gemini.tune.rank_communication import RankCommunication
from gemini.tune.step_simulation import StepResult, predict

_MOST_STAGES, _MOST_MICRO_BATCHES = 8, 128
_TICKS = 200  # of the shortest block: solvers work on whole numbers


def compose_schedule(model: CostModel, result: StepResult, seconds: float) -> StepResult | None:
    """Return the prediction with a composed plan; None where none is found in that time."""
    config = result.config
    if not 1 < config.pipeline <= _MOST_STAGES or config.chunks > 1 or config.micro_batches > _MOST_MICRO_BATCHES:
        return None
    left = result.memory.capacity - sum(
        size for name, size in result.memory.rows if name not in ("activations", "margin")
    )
    stages = result.stages
    unit = min(min(s.forward, s.input_gradient, s.weight_gradient) for s in stages) / _TICKS
    if unit <= 0 or left <= 0:
        return None
    kept = max(stage.activations for stage in stages) or 1.0

    def ticks(value: float) -> int:
        return max(1, round(value / unit))

    shape = placement(
        "vshape", config.pipeline, split=True,
        forward=[ticks(stage.forward) for stage in stages],
        input_gradient=[ticks(stage.input_gradient) for stage in stages],
        weight_gradient=[ticks(stage.weight_gradient) for stage in stages],
        memory=[max(1, round(2 * stage.activations / kept)) for stage in stages],
    )  # fmt: skip
    hop = RankCommunication(result.cluster, config).hop(max(stage.boundary for stage in stages[:-1]))
    shape.links = Links(latency=round(hop / unit))
    limit = max(2, int(2 * left / kept))
    try:
        plan = Composer.compose(shape, limit, nmicros=config.micro_batches, time_limit=seconds)
    except GeminiError:
        return None
    ran = execute(plan)
    busy = tuple(ran.makespan * (1 - idle) * unit for idle in ran.idle)
    peaks = tuple(float(peak) * kept / 2 for peak in ran.peak_memory)
    scaled = PipelineRun(ran.makespan * unit, busy, peaks, plan)
    named = replace(config, schedule="zb_h1")
    found = predict(model, result.cluster, named, lambda *_: scaled)
    return replace(found, config=replace(config, schedule="composed"), run=replace(scaled, plan=plan))
