"""Files of a parallel program.

    parallel/
        train.py, …                     the instrumented sources, which plain python runs
        config.json, README.md          the settings of the run; its command
        plan.json, partition.json       links: those of the first model
        stages/MODEL/stage_K.py         the stages, as a stage folder (`gemini.pipe.stage_folder`) with its manifest
                     plan.json          the schedule
                     partition.json     the stage of every node; graph.json, profile.json: inputs of code generation
                     step.json          the call that it is for, and the predicted costs

A planned kind of call has one folder; further kinds of a model are MODEL_2, MODEL_3, …. Stage files, plan.json and
config.json may be edited: what they say runs. The others belong together; a change of one is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.atomic_files import write_json
from gemini.cache.plans import CachedPlan
from gemini.errors import ArtifactError, GeminiError
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.pipe.manifest import NAME, PARTITION, PROFILE, hash_manifest
from gemini.pipe.manifest import hash_content as content_hash
from gemini.pipe.stage_folder import FolderContents, read_folder
from gemini.profiling.profile_result import Profile
from gemini.schedule import plan_files
from gemini.schedule.schedplan import SchedPlan

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.pipe.piped_model import Piped

FORMAT = 1
STAGES, PLAN, STEP, CONFIG, README = "stages", "plan.json", "step.json", "config.json", "README.md"
REASONS = "reasons.json"  # beside recorded stages: why other models have none
AGAIN = "gemini compile writes the program again"


@dataclass(frozen=True)
class StepFacts:
    """What a planned call must have in common with the recorded one, and how its stages were generated."""

    key: str  # of the graph (`gemini.cache.plans.graph_key`)
    model: str
    micro_batches: int
    parts: float  # calls like the captured one that make up a batch
    tail: tuple[int, ...] | None  # nodes that process the whole batch
    shares: tuple[int, ...]  # nodes whose values have a weight per micro-batch
    recompute: bool
    shards: int = 1  # workers of every stage: its files are then the code of each of them

    def matches(self, other: StepFacts) -> bool:
        """Whether a plan for these facts serves the others."""
        return replace(other, shares=self.shares, recompute=self.recompute, shards=self.shards) == self


@dataclass(frozen=True)
class PlannedStages:
    """One folder of stages with its plan."""

    folder: Path
    facts: StepFacts
    contents: FolderContents

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def stage_files(self) -> list[str]:
        """The names of the stage files, in order."""
        return [stage["file"] for stage in self.contents.manifest["stages"]]

    @cached_property
    def texts(self) -> dict[str, str]:
        """The present text of each stage file, by the hash of the generated one."""
        hashes: dict[str, str] = self.contents.manifest["files"]
        return {hashes[name]: (self.folder / name).read_text(encoding="utf-8") for name in self.stage_files}

    @cached_property
    def edited(self) -> tuple[str, ...]:
        """The stage files that were edited."""
        return tuple(f"{self.name}/{name}" for name in self.stage_files if name not in self.contents.files)

    @cached_property
    def plan(self) -> SchedPlan:
        """The schedule."""
        return plan_files.load(self.folder / PLAN)

    @cached_property
    def partition(self) -> Partition:
        """The stage of every node."""
        return Partition.from_json(json.loads(self.contents.files[PARTITION]))

    @cached_property
    def planned(self) -> CachedPlan:
        """Profile, partition, analysis and schedule."""
        step = json.loads((self.folder / STEP).read_text(encoding="utf-8"))
        profile = Profile.from_json(json.loads(self.contents.files[PROFILE]))
        analysis = Analysis.from_json(step["analysis"])
        return CachedPlan(profile, self.partition, analysis, self.plan, self.facts.recompute)

    def plan_for(self, graph: Graph) -> CachedPlan:
        """Return the plan, attached to a graph."""
        found = self.planned
        found.partition.validate(graph)
        return replace(found, analysis=replace(found.analysis, graph=graph, plan=found.schedule))


def write_planned_stages(folder: Path, piped: Piped, planned: CachedPlan, facts: StepFacts) -> None:
    """Write the stages of a plan into a new folder."""
    piped.save(folder)
    plan_files.save(planned.schedule, folder / PLAN)
    body = {name: getattr(facts, name) for name in StepFacts.__dataclass_fields__}
    write_json(folder / STEP, {"format": FORMAT, **body, "analysis": planned.analysis.to_json()})


def replace_stage_files(folder: Path, sources: dict[str, str]) -> None:
    """Replace the stage files of a new folder, and their hashes in its manifest."""
    manifest = json.loads((folder / NAME).read_text(encoding="utf-8"))
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
        manifest["files"][name] = source_hash(text)
    write_json(folder / NAME, {**manifest, "hash": hash_manifest(manifest)})


def read_planned_stages(folder: Path) -> PlannedStages:
    """Read a folder of stages with its plan; raises ArtifactError where other files than the stages have changed."""
    contents = read_folder(folder)
    stages = {stage["file"] for stage in contents.manifest["stages"]}
    faults = [line for line in contents.changed if line.partition(" ")[0] not in stages or line.endswith("is missing")]
    faults += [f"{name} is missing" for name in (PLAN, STEP) if not (folder / name).is_file()]
    if faults:
        listed = "\n".join(f"  - {line}" for line in faults)
        raise ArtifactError(f"{folder} has changed since it was compiled:\n{listed}\n    → restore the files; {AGAIN}")
    return PlannedStages(folder, _read_facts(folder / STEP), contents)


def _read_facts(path: Path) -> StepFacts:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ArtifactError(f"{path} has format {data['format']!r}, not {FORMAT}\n    → {AGAIN}")
        values: dict[str, Any] = {name: data[name] for name in StepFacts.__dataclass_fields__}
        tail = values["tail"]
        return StepFacts(**values | {"tail": None if tail is None else tuple(tail), "shares": tuple(values["shares"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}\n    → {AGAIN}") from error


def source_hash(source: str) -> str:
    """Return the hash under which a generated stage is known."""
    return content_hash(source.encode())


def read_program(folder: Path) -> list[PlannedStages]:
    """Read all planned stages of a program."""
    home = folder / STAGES
    if not home.is_dir():
        raise ArtifactError(f"{folder} is not a parallel program: it has no folder {STAGES}/\n    → {AGAIN}")
    try:
        found = [read_planned_stages(path) for path in sorted(home.iterdir()) if path.is_dir()]
    except GeminiError as error:
        raise ArtifactError(str(error)) from error
    if not found:
        raise ArtifactError(f"{home} has no stages\n    → {AGAIN}")
    return found
