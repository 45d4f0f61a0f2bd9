"""Program writer: sources, stages, plans, settings and a README become the folder of a parallel program."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ArtifactError
from gemini.instrument.output import dump_writer
from gemini.instrument.output.dump_writer import Dump
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import select
from gemini.instrument.program.code_tree import CodeTree
from gemini.parallel_program.program_files import CONFIG, PLAN, README, STAGES, PlannedStages, read_program
from gemini.pipe.manifest import PARTITION
from gemini.pipe.stage_folder import read_folder

Notice = Callable[[str], None]


@dataclass(frozen=True)
class ProgramSource:
    """A program as it is typed: a script or a module, and its arguments."""

    script: str | None
    module: str | None
    packages: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The script or module."""
        return self.script or self.module or ""

    def words(self) -> list[str]:
        """Return the words that run it after `python`."""
        return [*(["-m", self.module] if self.module else [self.script or ""]), *self.arguments]

    def dump(self, tree: CodeTree, notice: Notice) -> Dump:
        """Return the instrumented sources, which begin with the call of `run_parallel`."""
        manager = PassManager(select(notice=notice), notice=notice)
        manager.schedule()
        made = dump_writer.build_dump(
            tree.own(), manager, module=self.module or "", argv0=self.script or "", is_parallel=True
        )
        made.arguments = self.arguments
        return made

    def command(self, folder: Path) -> str:
        """Return the command that runs the parallel program."""
        target = folder if self.module else folder / os.path.basename(self.script or "")
        return shlex.join(["python", str(target), *self.arguments])


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise unless a program can be written: to a new or empty folder, or over an unedited program."""
    dump_writer.check_folder(folder)
    home = folder / STAGES
    if overwrite or not home.is_dir():
        return
    edited = [
        f"{path.name}/{line}" for path in sorted(home.iterdir()) if path.is_dir() for line in read_folder(path).changed
    ]
    if edited:
        listed = "\n".join(f"  - {line}" for line in edited)
        raise ArtifactError(f"{folder} is not replaced: it was edited\n{listed}\n    → --overwrite replaces it")


def write_program(folder: Path, dump: Dump, recorded: Path, config: GeminiConfig, source: ProgramSource) -> str:
    """Write the folder; return a line about its content."""
    settings = _settings(config)

    def add(draft: Path) -> None:
        shutil.copytree(recorded / STAGES, draft / STAGES)
        found = read_program(draft)
        for name in (PLAN, PARTITION):
            (draft / name).symlink_to(Path(STAGES, found[0].name, name))
        (draft / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        (draft / README).write_text(_readme(folder, found, settings, source), encoding="utf-8")

    dump_writer.write_dump(dump, folder, add)
    found = read_program(folder)
    stages = sum(len(one.stage_files) for one in found)
    plans = f"{len(found)} plan" + ("s" if len(found) > 1 else "")
    return f"{len(dump.files)} source files, {stages} stages, {plans}"


def _settings(config: GeminiConfig) -> dict[str, Any]:
    """Return the settings of the program: the plan replaces the file of a schedule."""
    values = config.differences()
    if str(values.get("schedule", "")).endswith(".json"):
        del values["schedule"]
    return values


def _readme(folder: Path, found: list[PlannedStages], settings: dict[str, Any], source: ProgramSource) -> str:
    rows = []
    for one in found:
        count = one.facts.micro_batches
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        rows.append(
            f"| `{STAGES}/{one.name}/` | {len(one.stage_files)} stages on {one.plan.ndevs} workers, {batches} |"
        )
    return _README.format(
        name=source.name, command=source.command(folder), folder=folder,
        program=source.command(folder).removeprefix("python "), rows="\n".join(rows),
        settings=json.dumps(settings, indent=2),
    )  # fmt: skip


_README = """\
# The parallel program of {name}

Written by `gemini compile`. Run it from the folder in which the original runs:

```sh
{command}
```

| file | content |
|---|---|
| the sources | the original with the edits of the passes; lines and comments are unchanged |
{rows}
| `plan.json`, `partition.json` | of the first of these: the schedule, and the stage of every operation |
| `config.json` | the settings of the run |

A folder of stages has one `stage_<k>.py` per stage, `plan.json`, `partition.json`, and what they were made from.

- Edit a stage file, and the edit runs. The first lines of the run name edited files.
- `gemini_python --verify {program}` compares the first steps with the original model.
- `gemini check {folder}` checks every file, without workers.
- Calls without a plan here (another batch, evaluation) are planned while the program runs, with one line.

Settings:

```json
{settings}
```
"""
