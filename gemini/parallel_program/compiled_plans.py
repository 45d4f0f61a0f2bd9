"""Compiled plans: the plans of a parallel program in place of a search, its stage files in place of generated text.

A plan serves a call whose graph has the key of the recorded one. A stage file serves wherever its original would be
generated: the text is generated and compared by hash, so a file never replaces a stage that it was not written for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.cache_files import software_versions
from gemini.errors import ArtifactError, Fault, ScheduleError
from gemini.log import log_line
from gemini.parallel_program.program_files import AGAIN, PlannedStages, StepFacts, read_program, source_hash
from gemini.schedule.validate import find_faults

if TYPE_CHECKING:
    from gemini.cache.plans import CachedPlan
    from gemini.codegen.stage_generator import StageCode
    from gemini.ir.graph import Graph


@dataclass(frozen=True)
class CompiledPlans:
    """The planned stages of one program."""

    folder: Path
    found: tuple[PlannedStages, ...]
    quiet: bool = False
    _noted: set[str] = field(default_factory=set)

    @property
    def edited(self) -> tuple[str, ...]:
        """The stage files that were edited."""
        return tuple(name for one in self.found for name in one.edited)

    def find(self, graph: Graph, facts: StepFacts) -> CachedPlan | None:
        """Return the plan for a graph; None, with one line, where the program has none."""
        for one in self.found:
            if one.facts.matches(facts):
                return one.plan_for(graph)
        count = "1 micro-batch" if facts.micro_batches == 1 else f"{facts.micro_batches} micro-batches"
        self._note(f"{self.folder.name} has no plan for calls of {facts.model} with {count} like this one: planned now")
        return None

    def replace_sources(self, codes: Sequence[StageCode]) -> tuple[tuple[StageCode, ...], Path | None]:
        """Return stages with the text of their files, and the folder of these; None where no file is theirs."""
        hashes = [source_hash(code.source) for code in codes]
        for one in self.found:
            if all(known in one.texts for known in hashes):
                texts = [one.texts[known] for known in hashes]
                made = tuple(
                    replace(code, source=text, is_edited=text != code.source)
                    for code, text in zip(codes, texts, strict=True)
                )
                return made, one.folder
        return tuple(codes), None

    def note_generated(self, model: str) -> None:
        """Log once that stages of a model are not from a file."""
        unused = f" (the edited {', '.join(self.edited)} do not apply)" if self.edited else ""
        self._note(f"{self.folder.name} has no stages for such calls of {model}: generated now{unused}")

    def _note(self, text: str) -> None:
        if not self.quiet and text not in self._noted:
            self._noted.add(text)
            log_line(f"gemini: {text}")


@functools.cache
def load_compiled_plans(folder: Path, quiet: bool) -> CompiledPlans:
    """Read and validate the plans of a program."""
    found = read_program(folder)
    _check_versions(folder, found)
    faults = [fault for one in found for fault in _plan_faults(one)]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ScheduleError(f"{folder} cannot run:\n{listed}")
    return CompiledPlans(folder, tuple(found), quiet)


def _check_versions(folder: Path, found: list[PlannedStages]) -> None:
    """Raise where another version of Gemini or torch has generated the stages: they may not fit its captures."""
    now = software_versions()
    for one in found:
        made = one.contents.manifest["made"]
        other = [
            f"{name} {made.get(name)} (now {now[name]})" for name in ("gemini", "torch") if made.get(name) != now[name]
        ]
        if other:
            raise ArtifactError(f"{folder} was compiled with {' and '.join(other)}\n    → {AGAIN}")


def _plan_faults(one: PlannedStages) -> list[Fault]:
    remedy = "correct plan.json; gemini check shows all faults"
    return [Fault(f"{one.name}/plan.json: {fault}", remedy) for fault in find_faults(one.plan)[:4]]
