"""The policy of `gemini compile`: it writes the plans and stages of a program's first steps.

The program ends when an optimizer is about to make one step more than requested. The first two calls of a model run in
this process, its plan from the third on. A program without optimizer of PyTorch runs to its end.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.cache.plans import CachedPlan
from gemini.config.gemini_config import GeminiConfig
from gemini.errors import GeminiError
from gemini.launcher.policy import ForcedPolicy
from gemini.parallel_program.program_files import REASONS, STAGES, replace_stage_files, write_planned_stages
from gemini.pipe.piped_model import build_piped
from gemini.planner.step_planner import step_facts
from gemini.runtime.run_journal import journaled_models

if TYPE_CHECKING:
    from gemini.runtime.pipelined.call_signature import CallKind
    from gemini.runtime.pipelined.pipelined_model import PipelinedModel


class RecordingPolicy(ForcedPolicy):
    """Starts workers for every trained model, and writes what they run."""

    def __init__(self, config: GeminiConfig, folder: Path, steps: int) -> None:
        super().__init__(config)
        self.folder, self.steps, self.owner = folder, steps, os.getpid()
        self._models: list[tuple[str, PipelinedModel]] = []
        self._steps: Counter[int] = Counter()
        register_optimizer_step_pre_hook(self._count_step)
        atexit.register(self._write)

    def _observe(self, model: nn.Module, pipelined: PipelinedModel, single_ms: float | None) -> None:
        super()._observe(model, pipelined, single_ms)
        pipelined.plans.plans_at_once = True  # the program is recorded, whatever its length
        self._models.append((type(model).__name__, pipelined))

    def _count_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self.owner:
            return
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] > self.steps:
            sys.exit(0)

    def _write(self) -> None:
        """Write the stages of every plan that has run, and the reasons of models without one."""
        if os.getpid() != self.owner:
            return
        written: set[str] = set()
        reasons = {one.model: one.main_reason for one in journaled_models() if one.main_reason}
        for name, pipelined in self._models:
            for kind in _installed_kinds(pipelined):
                try:
                    self._write_kind(name, kind, written)
                except (GeminiError, OSError) as error:
                    reasons[name] = f"its stages cannot be written: {error}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / REASONS).write_text(json.dumps(reasons), encoding="utf-8")

    def _write_kind(self, name: str, kind: CallKind, written: set[str]) -> None:
        plan = kind.plan
        assert plan is not None
        facts = step_facts(plan.graph, plan.micro_batches, plan.captured_parts, plan.tail)
        key = f"{facts.key} {facts.micro_batches}"
        if key in written:
            return
        written.add(key)
        home, number = self.folder / STAGES, 1
        while (target := home / (name if number == 1 else f"{name}_{number}")).exists():
            number += 1
        planned = CachedPlan(plan.profile, plan.partition, plan.analysis, plan.schedule, plan.recompute)
        facts = replace(facts, shares=kind.shares, recompute=plan.recompute, shards=plan.shard_count)
        piped = plan.build(kind.shares)
        if plan.shards is None:
            write_planned_stages(target, piped, planned, facts)
        else:  # the folder describes the model; its stage files are those of a shard
            write_planned_stages(target, build_piped(plan.graph, plan.profile, plan.partition), planned, facts)
            replace_stage_files(target, piped.sources)


def _installed_kinds(pipelined: PipelinedModel) -> Iterator[CallKind]:
    """Yield the kinds of calls whose stages are in the workers."""
    for kinds in pipelined.plans.kinds.values():
        for kind in kinds:
            for one in (kind, kind.whole_batch, *kind.variants):
                if one is not None and one.plan is not None and one.executor is not None:
                    yield one
