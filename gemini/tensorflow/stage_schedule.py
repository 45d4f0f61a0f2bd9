"""Stage schedule: the plan whose order of blocks a twin follows, and the device of each stage by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault, GeminiError
from gemini.schedule.composer import Composer
from gemini.schedule.library import LIBRARY, library
from gemini.schedule.placements import placement
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.user_plan import load_user_plan, replicas

_PER_STAGE = 2  # micro-batches, where the configuration sets no number


@dataclass(frozen=True)
class StageSchedule:
    """A schedule by name for so many devices and micro-batches; `plan` is None where there is no order."""

    name: str
    devices: int
    micro_batches: int
    plan: SchedPlan | None

    @property
    def device_of(self) -> tuple[int, ...]:
        """The device of every stage."""
        if self.plan is None:
            return tuple(range(self.devices))
        found = {block.stage or 0: self.plan.device(block)[0] for block in self.plan}
        return tuple(found[stage] for stage in sorted(found))

    def first(self, micro_batches: int) -> SchedPlan | None:
        """Return the plan for a batch of fewer micro-batches."""
        if self.plan is None or micro_batches == self.plan.nmicros:
            return self.plan
        try:
            if self.name in LIBRARY:
                return library(self.name, self.devices, micro_batches)
        except GeminiError:
            pass  # the schedule does not exist for this number
        return self.plan.first(micro_batches)


def choose_micro_batches(config: GeminiConfig, stages: int) -> int:
    """Return the micro-batches of a full batch."""
    return config.accum_degree or (_PER_STAGE * stages if stages > 1 else 1)


def stage_schedule(config: GeminiConfig, devices: int) -> StageSchedule:
    """Return the schedule of a configuration for so many devices."""
    count = choose_micro_batches(config, devices)
    name = "1f1b" if config.schedule == "auto" else config.schedule
    if devices == 1 or name == "none":
        return StageSchedule("none", devices, count, None)
    if name == "composed":
        plan = Composer.compose(placement("vshape", devices), devices, nmicros=count, time_limit=2.0)
    elif name in LIBRARY:
        plan = library(name, devices, count)
    else:
        plan = load_user_plan(Path(name), devices, count, groups=False)
    if replicas(plan) > 1:
        fault = Fault(f"schedule = {name!r} holds several replicas of the model", "use one with one replica, as 1f1b")
        raise ConfigError([fault])
    return StageSchedule(Path(name).name, devices, count, plan)
