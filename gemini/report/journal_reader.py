"""Journal reader: the run journals of a folder, for `gemini explain` and other readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError
from gemini.runtime.run_journal import FORMAT, ModelJournal, journal_files


@dataclass(frozen=True)
class RecordedRun:
    """A run: its models, how its program was started, and when the journal was written."""

    models: list[ModelJournal]
    program: dict[str, Any]
    time: float


def read_newest(folder: Path) -> list[ModelJournal]:
    """Return the models of the last run that ended; raises ArtifactError."""
    return read_run(folder).models


def read_run(folder: Path) -> RecordedRun:
    """Return the last run that ended; raises ArtifactError."""
    for path in journal_files(folder):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"it has format {content['format']}, this version reads {FORMAT}")
            models = [ModelJournal.from_json(entry) for entry in content["models"]]
            return RecordedRun(models, content["program"], content["time"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"cannot read {path}: {error}\n    → run the script again") from error
    raise ArtifactError(
        f"{folder} holds no journal of a run\n    → run a script with workers first, or name its run folder: "
        "gemini explain --run-folder DIR"
    )
